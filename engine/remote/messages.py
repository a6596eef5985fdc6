"""Frames between the server and an engine's process, in JSON, which pydantic writes and reads by
the types of the values. Nothing is pickled.

A frame to the process is a `Numbered` call or a `Cancel`. One from it begins with a byte, which of
`Said` it is.
"""

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import ConfigDict, Discriminator, TypeAdapter

from engine.api import EngineStopped, InvalidRequest, ModelError, NoGrammars, QueueFull
from engine.remote.calls import RESULTS, Call
from engine.sockets import framed
from engine.values.output import OutputEvent
from kvstore.tier.types import TierError


class Said(IntEnum):
    """What a frame from an engine's process is."""

    ALIVE = 1  # whether it is, at regular intervals from the first moment on
    LINE = 2  # on how loading goes
    EVENTS = 3
    RETURNED = 4
    RAISED = 5
    ENDED = 6  # the engine has; no more events come


@dataclass(frozen=True, slots=True)
class Numbered:
    """A call under a number, which its result or error repeats."""

    number: int
    call: Annotated[Call, Discriminator("call")]
    kind: Literal["call"] = "call"


@dataclass(frozen=True, slots=True)
class Cancel:
    """Ends the call of that number, which is not answered then."""

    number: int
    kind: Literal["cancel"] = "cancel"


@dataclass(frozen=True, slots=True)
class Raised:
    """An error in place of a result: its class, and what that is made of."""

    number: int
    error: str
    arguments: tuple[str | int, ...]

    def exception(self) -> Exception:
        return ERRORS.get(self.error, RuntimeError)(*self.arguments)


ToProcess: TypeAlias = Annotated[Numbered | Cancel, Discriminator("kind")]

ERRORS: Mapping[str, Callable[..., Exception]] = {
    error.__name__: error
    for error in (EngineStopped, InvalidRequest, ModelError, NoGrammars, QueueFull, TierError)
}

MAX_EVENTS_BYTES = 4 * 1024**2
"""Of a frame of several events. The receiver parses a frame whole, while later ones wait."""

_NUMBER = struct.Struct("<Q")
_TO_PROCESS: TypeAdapter[Numbered | Cancel] = TypeAdapter(ToProcess)
_RAISED = TypeAdapter(Raised)
_EVENTS = TypeAdapter(
    list[OutputEvent],
    config=ConfigDict(
        ser_json_inf_nan="constants",  # of log-probabilities
        ser_json_bytes="base64",  # vectors, in a third of the bytes of numbers
        val_json_bytes="base64",
    ),
)
_ALIVE = TypeAdapter(bool)
_LINE = TypeAdapter(str)


def to_process(message: Numbered | Cancel) -> bytes:
    return framed(_TO_PROCESS.dump_json(message))


def read_to_process(body: bytes) -> Numbered | Cancel:
    return _TO_PROCESS.validate_json(body)


def alive_frame(is_alive: bool) -> bytes:
    return _said(Said.ALIVE, _ALIVE.dump_json(is_alive))


def ended_frame() -> bytes:
    return _said(Said.ENDED, b"")


def line_frame(line: str) -> bytes:
    return _said(Said.LINE, _LINE.dump_json(line))


def events_frames(events: Sequence[OutputEvent]) -> Iterator[bytes]:
    """The events of a step: in one frame, or in several of at most MAX_EVENTS_BYTES where prompt
    logprobs make them long. An event alone is far shorter than a frame may be: its lists are
    bounded by `engine.core.commit.PROMPT_LOGPROBS_AT_ONCE` and by the drafts of a step.
    """
    body = _EVENTS.dump_json(list(events), exclude_defaults=True)
    if len(body) <= MAX_EVENTS_BYTES or len(events) == 1:
        yield _said(Said.EVENTS, body)
        return
    half = len(events) // 2
    yield from events_frames(events[:half])
    yield from events_frames(events[half:])


def returned_frame(number: int, call: Call, result: object) -> bytes:
    return _said(Said.RETURNED, _NUMBER.pack(number) + RESULTS[type(call)].dump_json(result))


def raised_frame(number: int, error: Exception) -> bytes:
    """Of an error that is none of the engine's, the words alone."""
    match error:
        case InvalidRequest():
            arguments: tuple[str | int, ...] = str(error), error.param
        case QueueFull():
            arguments = str(error), error.retry_after_seconds
        case _:
            arguments = (str(error),)
    names = (kind.__name__ for kind in type(error).__mro__)
    name = next((name for name in names if name in ERRORS), RuntimeError.__name__)
    return _said(Said.RAISED, _RAISED.dump_json(Raised(number, name, arguments)))


def read_alive(body: bytes) -> bool:
    return _ALIVE.validate_json(body[1:])


def read_line(body: bytes) -> str:
    return _LINE.validate_json(body[1:])


def read_events(body: bytes) -> list[OutputEvent]:
    return _EVENTS.validate_json(body[1:])


def read_raised(body: bytes) -> Raised:
    return _RAISED.validate_json(body[1:])


def read_number(body: bytes) -> int:
    """Of a RETURNED frame, whose result `read_result` reads."""
    (number,) = _NUMBER.unpack_from(body, 1)
    return int(number)


def read_result(body: bytes, call: Call) -> Any:
    return RESULTS[type(call)].validate_json(body[1 + _NUMBER.size :])


def _said(said: Said, body: bytes) -> bytes:
    return framed(bytes([said]) + body)
