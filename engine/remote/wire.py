"""Frames between the server and an engine's process, in JSON, which pydantic writes and reads by
the types of the values. Nothing is pickled.

A frame to the process is a `Message`. One from it has a header, with its `Kind` and the number of
the call that it answers, and JSON of that kind.
"""

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from pydantic import ConfigDict, TypeAdapter

from engine.api import EngineStopped, InvalidRequest, ModelError, NoGrammars, QueueFull
from engine.process.sockets import framed
from engine.remote.calls import CALLS
from engine.values.output import OutputEvent
from kvstore.disk.types import DiskError

CANCEL = "cancel"
"""Stands for a call's name in a message that ends the call of its number, which is not answered."""

ERRORS: Mapping[type[Exception], tuple[str, ...]] = {
    EngineStopped: (),
    InvalidRequest: ("param",),
    ModelError: (),
    NoGrammars: (),
    QueueFull: ("retry_after_seconds",),
    DiskError: (),
    RuntimeError: (),
}
"""The errors that a call may raise, each with its fields besides its words. Any other error is
raised as a RuntimeError with the same words.
"""

MAX_EVENTS_BYTES = 4 * 1024**2
"""Of a frame of several events. The receiver parses a frame whole, while later ones wait."""

_HEADER = struct.Struct("<BQ")


@dataclass(frozen=True, slots=True)
class Message:
    """A call under a number, which its result or error repeats; or the end of it, see CANCEL."""

    number: int
    name: str
    arguments: tuple[Any, ...] = ()

    def frame(self) -> bytes:
        call = CALLS.get(self.name)
        arguments = b"" if call is None else call.arguments.dump_json(self.arguments)
        return framed(f"{self.number} {self.name} ".encode() + arguments)

    @classmethod
    def read(cls, body: bytes) -> "Message":
        number, name, arguments = body.split(b" ", 2)
        call = CALLS.get(name.decode())
        values = () if call is None else call.arguments.validate_json(arguments)
        return cls(int(number), name.decode(), values)


class Kind(IntEnum):
    """What a frame from an engine's process is."""

    ALIVE = 1  # whether the engine is, at regular intervals from the first moment on
    LINE = 2  # on how loading goes
    EVENTS = 3
    RETURNED = 4  # the result of a call, see CALLS
    RAISED = 5
    ENDED = 6  # the engine has; no more events come


@dataclass(frozen=True, slots=True)
class Raised:
    """An error in place of a result: the name of its class, and what that is made of."""

    error: str
    arguments: tuple[str | int, ...]

    @classmethod
    def of(cls, error: Exception) -> "Raised":
        kind = next((kind for kind in type(error).__mro__ if kind in ERRORS), RuntimeError)
        return cls(kind.__name__, (str(error), *(getattr(error, name) for name in ERRORS[kind])))

    def exception(self) -> Exception:
        (kind,) = (kind for kind in ERRORS if kind.__name__ == self.error)
        return kind(*self.arguments)


ALIVE = TypeAdapter(bool)
LINE = TypeAdapter(str)
RAISED = TypeAdapter(Raised)
EVENTS = TypeAdapter(
    list[OutputEvent],
    config=ConfigDict(
        ser_json_inf_nan="constants",  # of log-probabilities
        ser_json_bytes="base64",  # vectors, in a third of the bytes of numbers
        val_json_bytes="base64",
    ),
)


def frame(kind: Kind, json: bytes = b"", number: int = 0) -> bytes:
    """A frame from an engine's process. Raises ProtocolError where it would be too long."""
    return framed(_HEADER.pack(kind, number) + json)


def read_frame(body: bytes) -> tuple[int, int, bytes]:
    """The kind, the number and the JSON of a frame from an engine's process."""
    kind, number = _HEADER.unpack_from(body)
    return kind, number, body[_HEADER.size :]


def events_frames(events: Sequence[OutputEvent]) -> Iterator[bytes]:
    """The events of a step: in one frame, or in several of at most MAX_EVENTS_BYTES where prompt
    logprobs make them long. An event alone is far shorter than a frame may be: its lists are
    bounded by `engine.core.commit.PROMPT_LOGPROBS_AT_ONCE` and by the drafts of a step.
    """
    json = EVENTS.dump_json(list(events), exclude_defaults=True)
    if len(json) <= MAX_EVENTS_BYTES or len(events) == 1:
        yield frame(Kind.EVENTS, json)
        return
    half = len(events) // 2
    yield from events_frames(events[:half])
    yield from events_frames(events[half:])
