"""Messages between the daemon and its grammar workers: frames over a pair of sockets.

A request is JSON. A report is a binary header with masks after it. Nothing is pickled: a worker has
parsed input of clients, so its reports are not trusted.
"""

import json
import math
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeAlias

from engine.process.sockets import ProtocolError, framed

MEMORY_BYTES = 1024**3
"""The memory of one worker. A vocabulary of 150,000 tokens takes a tenth of it."""

EXCEPTION_EXIT = 1
"""A worker's exit code after an exception. Python's own is the same."""

_HEADER = struct.Struct("<BQIddq?III")

WireMessage: TypeAlias = dict[str, Any]
"""A request. `do` is one of:

- `try`: compile the grammar (`kind`, `text`) and make its first masks.
- `advance`: give the matcher `id` more `tokens`, and return what may follow them and what may
  follow along a `draft`. With `kind` and `text` the matcher is opened first.
- `close`: forget the matcher `id`.

The first two may take `seconds` of processor time. They are done and answered in order.
"""


class ReportKind(IntEnum):
    """The kind of a report."""

    READY = 1  # the worker has started, and has compiled a grammar
    VERDICT = 2  # a grammar was tried: its `error`, or none
    MASK = 3  # the tokens that may follow
    ADVANCED = 4  # tokens were accepted, perhaps not all of them, and no mask was made
    COMPLETE = 5  # nothing may follow
    FAILED = 6  # the grammar cannot be followed: its `error`


@dataclass(frozen=True, slots=True)
class JobReport:
    """A worker's answer to the job of session `number`, of which it has accepted `n_tokens`.

    In a `mask`, token t is bit t % 32, from the lowest, of the 32-bit word t // 32. `forced` are
    the next tokens as far as the grammar leaves no choice. `draft_masks` are the masks after the
    first token of the draft, after the second, and so on, as far as the grammar follows the draft
    and the time has lasted; the grammar may be complete after the token that follows the last of
    them. `seconds` and `draft_seconds` are processor time, `bytes_left` of the worker's memory.
    """

    kind: ReportKind
    number: int = 0
    n_tokens: int = 0
    seconds: float = 0.0
    draft_seconds: float = 0.0
    bytes_left: int = 0
    is_draft_complete: bool = False
    forced: tuple[int, ...] = ()
    mask: bytes = b""
    draft_masks: bytes = b""
    error: str = ""


def request_frame(message: WireMessage) -> bytes:
    return framed(json.dumps(message).encode())


def read_request(body: bytes) -> WireMessage:
    message: WireMessage = json.loads(body)
    return message


def report_frame(report: JobReport) -> bytes:
    header = _HEADER.pack(
        report.kind,
        report.number,
        report.n_tokens,
        report.seconds,
        report.draft_seconds,
        report.bytes_left,
        report.is_draft_complete,
        len(report.forced),
        len(report.mask),
        len(report.draft_masks),
    )
    forced = struct.pack(f"<{len(report.forced)}I", *report.forced)
    error = report.error.encode("utf-8", "replace")
    return framed(b"".join((header, forced, report.mask, report.draft_masks, error)))


def read_report(body: bytes) -> JobReport:
    """Raises ProtocolError."""
    try:
        kind, number, n_tokens, seconds, draft_seconds, bytes_left, is_draft_complete, *lengths = (
            _HEADER.unpack_from(body)
        )
        n_forced, n_mask_bytes, n_draft_bytes = lengths
        mask_at = _HEADER.size + 4 * n_forced
        draft_at = mask_at + n_mask_bytes
        error_at = draft_at + n_draft_bytes
        if error_at > len(body) or not 0.0 <= seconds + draft_seconds < math.inf:
            raise ProtocolError("a report that is cut short, or took no time that there is")
        return JobReport(
            ReportKind(kind),
            number,
            n_tokens,
            seconds,
            draft_seconds,
            bytes_left,
            is_draft_complete,
            struct.unpack_from(f"<{n_forced}I", body, _HEADER.size),
            body[mask_at:draft_at],
            body[draft_at:error_at],
            body[error_at:].decode(),
        )
    except (ValueError, struct.error) as error:
        raise ProtocolError(f"not a report of a grammar worker: {error}") from error
