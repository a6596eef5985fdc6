"""Frames between the server and an engine's process: JSON that pydantic writes and reads. Nothing
is pickled.

A frame to the process is a `CallMessage`. A frame from the process has a header, with its `Kind`
and the number of the call that it answers, and JSON of that kind.
"""

import struct
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from inspect import signature
from types import GenericAlias
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, get_type_hints

from pydantic import ConfigDict, TypeAdapter

from engine.api import (
    EngineStopped,
    ImagesBusy,
    InvalidImage,
    InvalidRequest,
    ModelError,
    NoGrammars,
    QueueFull,
)
from engine.process.sockets import framed
from engine.values.output import OutputEvent
from kvstore.disk.types import DiskError

CANCEL = "cancel"
"""The name in a message that cancels the call with its number. A cancelled call is not answered."""

ERRORS: Mapping[type[Exception], tuple[str, ...]] = {
    EngineStopped: (),
    ImagesBusy: ("retry_after_seconds",),
    InvalidImage: (),
    InvalidRequest: ("param",),
    ModelError: (),
    NoGrammars: (),
    QueueFull: ("retry_after_seconds",),
    DiskError: (),
    RuntimeError: (),
}
"""The errors that a call may raise, each with its fields besides its message. Any other error is
raised as a RuntimeError with the same message.
"""

MAX_EVENTS_BYTES = 4 * 1024**2
"""Limit for a frame of several events. The receiver parses a whole frame while later ones wait."""

_HEADER = struct.Struct("<BQ")

P = ParamSpec("P")
R = TypeVar("R")


class Call(Generic[P, R]):
    """The name of a call, and the types of its arguments and of its result, which are read from the
    annotations of a method.
    """

    def __init__(self, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]) -> None:
        hints = get_type_hints(method)
        result: Any = hints.pop("return") | None  # a dataclass alone takes no config
        self.result: TypeAdapter[R] = TypeAdapter(result, config=BYTES)
        arguments: Any = GenericAlias(tuple, tuple(hints.values()))
        self.arguments: TypeAdapter[tuple[Any, ...]] = TypeAdapter(arguments, config=BYTES)
        self.name = method.__name__
        self.signature = signature(method)

    def json(self, *arguments: P.args, **named: P.kwargs) -> bytes:
        """All arguments as JSON, by position, defaults included."""
        bound = self.signature.bind(None, *arguments, **named)
        bound.apply_defaults()
        return self.arguments.dump_json(bound.args[1:])


@dataclass(frozen=True, slots=True)
class CallMessage:
    """A call with its number, which the result or the error repeats; or, with CANCEL as its name,
    the cancellation of the call with that number.
    """

    number: int
    name: str
    json: bytes = b""  # the arguments

    def frame(self) -> bytes:
        """Raises ProtocolError if the frame would be too long."""
        return framed(f"{self.number} {self.name} ".encode() + self.json)

    @classmethod
    def read(cls, body: bytes) -> "CallMessage":
        """Read the body of a frame."""
        number, name, json = body.split(b" ", 2)
        return cls(int(number), name.decode(), json)


class Kind(IntEnum):
    """The kinds of frames from an engine's process."""

    ALIVE = 1  # whether the engine is alive; sent at regular intervals from the start on
    LINE = 2  # progress of loading, for a person to read
    EVENTS = 3
    RETURNED = 4  # the result of a call
    RAISED = 5  # the error of a call
    ENDED = 6  # the engine has ended; no more events come


@dataclass(frozen=True, slots=True)
class Raised:
    """An error in place of a result: the name of its class and its arguments, see ERRORS."""

    error: str
    arguments: tuple[str | int, ...]

    @classmethod
    def of(cls, error: Exception) -> "Raised":
        """The first class of the error that is listed in ERRORS, else RuntimeError."""
        kind = next((kind for kind in type(error).__mro__ if kind in ERRORS), RuntimeError)
        return cls(kind.__name__, (str(error), *(getattr(error, name) for name in ERRORS[kind])))

    def exception(self) -> Exception:
        """The error, to be raised by the server."""
        (kind,) = (kind for kind in ERRORS if kind.__name__ == self.error)
        return kind(*self.arguments)


BYTES = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")
"""Vectors and prompts take a third of the bytes of their numbers, and no time for each."""

ALIVE = TypeAdapter(bool)
LINE = TypeAdapter(str)
RAISED = TypeAdapter(Raised)
EVENTS = TypeAdapter(
    list[OutputEvent],
    config=ConfigDict(ser_json_inf_nan="constants", **BYTES),  # log-probabilities may be infinite
)


def frame(kind: Kind, json: bytes = b"", number: int = 0) -> bytes:
    """A frame from an engine's process. Raises ProtocolError if it would be too long."""
    return framed(_HEADER.pack(kind, number) + json)


def read_frame(body: bytes) -> tuple[int, int, bytes]:
    """The kind, the number and the JSON of a frame from an engine's process."""
    kind, number = _HEADER.unpack_from(body)
    return kind, number, body[_HEADER.size :]


def events_frames(events: Sequence[OutputEvent]) -> Iterator[bytes]:
    """The events of a step: in one frame, or in several of at most MAX_EVENTS_BYTES if prompt
    logprobs make them long. A single event is far shorter than a frame may be: its lists are
    bounded by `engine.core.commit.PROMPT_LOGPROBS_AT_ONCE` and by the drafts of a step.
    """
    json = EVENTS.dump_json(list(events), exclude_defaults=True)
    if len(json) <= MAX_EVENTS_BYTES or len(events) == 1:
        yield frame(Kind.EVENTS, json)
        return
    half = len(events) // 2
    yield from events_frames(events[:half])
    yield from events_frames(events[half:])
