"""What a daemon and its grammar processes tell each other: frames over a pair of sockets.

Bodies to the process are JSON. Bodies
from it begin with a `Said`; a `MASK` and an `AHEAD` have bits behind their headers, the others are
JSON.
No pickle: the process has parsed what clients sent, and what it says is not trusted.
"""

import json
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeAlias

from engine.process.sockets import ProtocolError, framed

EXCEPTION_EXIT = 1
"""A grammar process's exit code after an exception. Python's own is the same."""

_MASK = struct.Struct("<BQIdI")
_AHEAD = struct.Struct("<BQQd?")

Message: TypeAlias = dict[str, Any]


class Said(IntEnum):
    """What a frame from a grammar process is."""

    VERDICT = 1  # on a trial
    BEGUN = 2  # a matcher's job, which is what the process does from now on
    MASK = 3
    STOPPED = 4  # nothing may follow any more
    FAILED = 5
    AHEAD = 6


@dataclass(frozen=True, slots=True)
class Mask:
    """Which tokens may follow behind `n_tokens` of a matcher: token t is bit t % 32, from the
    lowest, of the 32-bit word t // 32. `seconds`: of the processor, that the job has taken since
    it was another's turn. `forced` is what must follow, as far as there is no choice.
    """

    matcher: int
    n_tokens: int
    seconds: float
    forced: tuple[int, ...]
    bits: bytes


@dataclass(frozen=True, slots=True)
class Ahead:
    """Which tokens may follow behind the first token of a draft, behind the second, and so on: one
    mask after another, as far as the grammar follows the draft and the time has lasted. It
    `is_complete` with the token behind the last mask, or may go on.
    """

    matcher: int
    question: int
    seconds: float
    is_complete: bool
    bits: bytes


Answered: TypeAlias = Mask | Ahead
"""What comes without JSON."""


@dataclass(frozen=True, slots=True)
class Report:
    """Anything else that a grammar process says."""

    said: Said
    fields: Message


def request_frame(fields: Message) -> bytes:
    return framed(json.dumps(fields).encode())


def report_frame(said: Said, fields: Message) -> bytes:
    return framed(bytes([said]) + json.dumps(fields).encode())


def mask_frame(mask: Mask) -> bytes:
    n_forced = len(mask.forced)
    header = _MASK.pack(Said.MASK, mask.matcher, mask.n_tokens, mask.seconds, n_forced)
    return framed(header + struct.pack(f"<{n_forced}I", *mask.forced) + mask.bits)


def ahead_frame(ahead: Ahead) -> bytes:
    header = _AHEAD.pack(
        Said.AHEAD, ahead.matcher, ahead.question, ahead.seconds, ahead.is_complete
    )
    return framed(header + ahead.bits)


def read_request(body: bytes) -> Message:
    message: Message = json.loads(body)
    return message


def read_report(body: bytes) -> Answered | Report:
    """Raises ProtocolError."""
    try:
        said = Said(body[0])
        if said is Said.MASK:
            _, matcher, n_tokens, seconds, n_forced = _MASK.unpack_from(body)
            forced = struct.unpack_from(f"<{n_forced}I", body, _MASK.size)
            bits = body[_MASK.size + 4 * n_forced :]
            return Mask(matcher, n_tokens, seconds, forced, bits)
        if said is Said.AHEAD:
            _, matcher, question, seconds, is_complete = _AHEAD.unpack_from(body)
            return Ahead(matcher, question, seconds, is_complete, body[_AHEAD.size :])
        fields = json.loads(body[1:])
    except (IndexError, ValueError, RecursionError, struct.error) as error:
        raise ProtocolError(f"not a frame of a grammar process: {error}") from error
    if not isinstance(fields, dict):
        raise ProtocolError("a report without fields")
    return Report(said, fields)
