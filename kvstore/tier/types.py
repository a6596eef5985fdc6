"""What goes into the disk tier and comes out of it: block hashes, bytes, and reasons why not."""

import errno
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from kvstore.tokens import Digest

Buffer = bytes | bytearray | memoryview

MIB = 1 << 20
LEAST_BYTES = 16 * MIB
"""The index alone may take a few MiB for a moment."""

SMALLEST_SEGMENT, MOST_SEGMENTS = 64 * MIB, 1024


class TierError(Exception):
    """The folder cannot be used; the message says why, for people."""


class Fault(StrEnum):
    """Why something that was on disk, or was to be, is not."""

    CHECKSUM = "checksum"
    SHORT_READ = "short_read"
    MISSING = "missing"
    IO = "io"
    NO_SPACE = "no_space"
    READ_ONLY = "read_only"
    INDEX = "index"
    RESOURCES = "resources"
    """Out of descriptors or memory: the bytes may be sound."""
    INTERNAL = "internal"
    """A fault of this program; the log says which."""
    GONE = "gone"
    """Forgotten or evicted before it was read: nothing is wrong."""


FAULT_OF_ERRNO = {
    errno.ENOENT: Fault.MISSING,
    errno.ENOSPC: Fault.NO_SPACE,
    errno.EDQUOT: Fault.NO_SPACE,
    errno.EROFS: Fault.READ_ONLY,
    errno.EACCES: Fault.READ_ONLY,
    errno.EPERM: Fault.READ_ONLY,
    errno.EMFILE: Fault.RESOURCES,
    errno.ENFILE: Fault.RESOURCES,
    errno.ENOMEM: Fault.RESOURCES,
}


def fault_of(error: OSError) -> Fault:
    return FAULT_OF_ERRNO.get(error.errno or 0, Fault.IO)


@dataclass(frozen=True, slots=True)
class Entry:
    """The bytes for one block hash. Its user decides what each part is, and how large.

    A part that is None is not there.
    """

    block_hash: Digest
    n_tokens: int
    parts: tuple[Buffer | None, ...]

    @property
    def part_bytes(self) -> tuple[int | None, ...]:
        return tuple(None if part is None else memoryview(part).nbytes for part in self.parts)

    @property
    def has(self) -> tuple[bool, ...]:
        """Which parts are there."""
        return tuple(part is not None for part in self.parts)

    @property
    def n_bytes(self) -> int:
        return sum(filter(None, self.part_bytes))

    def with_parts_of(self, other: "Entry") -> "Entry":
        """It, with what it lacks and another of the same hash has."""
        both = zip(self.parts, other.parts, strict=True)
        return replace(self, parts=tuple(theirs if mine is None else mine for mine, theirs in both))


@dataclass(frozen=True, slots=True)
class Extent:
    """Entries that follow each other, each the parent of the next, below `parent`.

    `root` is the digest of their namespace, and `parent` where they begin the path.
    """

    root: Digest
    parent: Digest
    entries: tuple[Entry, ...]

    @property
    def n_bytes(self) -> int:
        return sum(entry.n_bytes for entry in self.entries)

    def with_parents(self) -> Iterator[tuple[Digest, Entry]]:
        parent = self.parent
        for entry in self.entries:
            yield parent, entry
            parent = entry.block_hash


@dataclass(frozen=True, slots=True)
class EntryInfo:
    """What is known of a stored entry without reading it. `last_used` is in Unix seconds."""

    n_tokens: int
    part_bytes: tuple[int | None, ...]
    n_bytes: int
    last_used: float


@dataclass(frozen=True, slots=True)
class ReadRun:
    """The entries of `hashes[start:start + len(entries)]`, checked."""

    start: int
    entries: tuple[Entry, ...]

    @property
    def n_bytes(self) -> int:
        return sum(entry.n_bytes for entry in self.entries)


@dataclass(frozen=True, slots=True)
class ReadFailure:
    """`hashes[start]` cannot be had, nor what comes after it. The last thing that is delivered."""

    start: int
    fault: Fault


@dataclass(frozen=True, slots=True)
class TierLimits:
    """How much of everything, in bytes.

    max_bytes: all files of the directory together, as `du` counts them.
    buffer_bytes: handed over and not yet written.
    read_ahead_bytes: read for one ticket and not yet consumed, if it is not told another number; a
    run may exceed it by itself.
    run_bytes: the most that is read, checked and delivered at once, unless one entry is larger.
    daily_bytes: the most that is written in a day of UTC.
    least_free: the part of the disk that is left free for others.
    """

    max_bytes: int
    buffer_bytes: int = 64 * MIB
    read_ahead_bytes: int = 8 * MIB
    run_bytes: int = 4 * MIB
    daily_bytes: float = math.inf
    least_free: float = 0.05
    segment_bytes: int = 0

    def __post_init__(self) -> None:
        if self.max_bytes < LEAST_BYTES:
            raise TierError(f"a disk cache takes at least {LEAST_BYTES // MIB} MiB")
        if not self.segment_bytes:
            fitting = max(SMALLEST_SEGMENT, self.max_bytes // MOST_SEGMENTS)
            object.__setattr__(self, "segment_bytes", min(fitting, self.max_bytes // 8))
