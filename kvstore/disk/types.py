"""Values of the disk store's interface: hashes, bytes, limits and faults."""

import errno
import math
import threading
from collections import Counter
from dataclasses import dataclass, field, replace
from enum import StrEnum

from kvstore.tokens import Digest

Buffer = bytes | memoryview

MIB = 1 << 20
LEAST_BYTES = 16 * MIB

EXTENT_BYTES, LEAST_EXTENTS = 16 * MIB, 16
"""Files of this size are read and written at a disk's full speed. A directory that holds fewer than
LEAST_EXTENTS of them gets smaller ones, so that eviction has a choice."""


class DiskError(Exception):
    """The cache directory cannot be used. The message says why, for the person who starts it."""


class Fault(StrEnum):
    """Why data could not be written, or could not be read back. Labels of a metric."""

    CHECKSUM = "checksum"
    SHORT_READ = "short_read"
    HEADER = "header"
    """The beginning of a file is damaged, so nothing is known of the rest."""
    MISSING = "missing"
    IO = "io"
    NO_SPACE = "no_space"
    READ_ONLY = "read_only"
    RESOURCES = "resources"
    """Too few file descriptors or too little memory. The bytes on disk may be sound."""
    INTERNAL = "internal"
    """A bug of this program. The log has the trace."""
    GONE = "gone"
    """Evicted or removed before it was read. Nothing is wrong, so this is not counted."""


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


def fault_of(error: Exception) -> Fault:
    match error:
        case OSError():
            return FAULT_OF_ERRNO.get(error.errno or 0, Fault.IO)
        case MemoryError():
            return Fault.RESOURCES
        case _:
            return Fault.INTERNAL


@dataclass(frozen=True, slots=True)
class Entry:
    """The KV of one block, or of its first `n_tokens` tokens, as bytes.

    The caller decides what each part is (the block, a window's block, a recurrent state) and how
    large it is. A part that is None is absent.
    """

    block_hash: Digest
    n_tokens: int
    parts: tuple[Buffer | None, ...]

    @property
    def sizes(self) -> tuple[int | None, ...]:
        """The bytes of each part, None for an absent one."""
        return tuple(None if part is None else memoryview(part).nbytes for part in self.parts)

    @property
    def n_bytes(self) -> int:
        return sum(filter(None, self.sizes))


@dataclass(frozen=True, slots=True)
class EntryHead:
    """An entry without its bytes. `sizes`: the bytes of each part, None for an absent one.

    `checksum` and `offset`, of its first part in its file, are known once it has been written.
    """

    block_hash: Digest
    n_tokens: int
    sizes: tuple[int | None, ...]
    checksum: bytes = b""
    offset: int = 0

    @property
    def n_bytes(self) -> int:
        return sum(filter(None, self.sizes))

    @property
    def end(self) -> int:
        """The offset after its last part."""
        return self.offset + self.n_bytes


@dataclass(frozen=True, slots=True)
class ReadRun:
    """The entries of `hashes[start:start + len(entries)]` of a read, their checksums verified."""

    start: int
    entries: tuple[Entry, ...]

    @property
    def n_bytes(self) -> int:
        return sum(entry.n_bytes for entry in self.entries)


@dataclass(frozen=True, slots=True)
class ReadFailure:
    """`hashes[start]` of a read is not available, nor is anything after it. Ends the read."""

    start: int
    fault: Fault


@dataclass(frozen=True, slots=True)
class DiskLimits:
    """Limits in bytes. Raises DiskError for a `max_bytes` that is too small to be of use.

    max_bytes: all files of the directory together, as `du` counts them.
    buffer_bytes: accepted and not yet written.
    read_ahead_bytes: read for one ticket and not yet consumed, unless the ticket is given another
        limit; a single run may exceed it.
    run_bytes: read, verified and delivered at once, unless a single entry is larger.
    daily_bytes: written in one day of UTC, by all processes that share the directory.
    least_free: the share of the file system that is left free for other programs.
    extent_bytes: a file is not joined with further entries once it has this size; 0: derived.
    """

    max_bytes: int
    buffer_bytes: int = 64 * MIB
    read_ahead_bytes: int = 8 * MIB
    run_bytes: int = 4 * MIB
    daily_bytes: float = math.inf
    least_free: float = 0.05
    extent_bytes: int = 0

    def __post_init__(self) -> None:
        if self.max_bytes < LEAST_BYTES:
            raise DiskError(f"a disk cache takes at least {LEAST_BYTES // MIB} MiB")
        if not self.extent_bytes:
            derived = min(EXTENT_BYTES, self.max_bytes // LEAST_EXTENTS)
            object.__setattr__(self, "extent_bytes", derived)


@dataclass(slots=True)
class DiskCounters:
    """Counted since the store was opened. `refused_entries` were accepted and then not written, for
    lack of space, of today's budget, or of their parent.
    """

    written_entries: int = 0
    written_bytes: int = 0
    read_entries: int = 0
    read_bytes: int = 0
    evicted_entries: int = 0
    refused_entries: int = 0
    faults: Counter[Fault] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Guards the counts of faults and reads, which several threads change."""

    def count_fault(self, fault: Fault) -> None:
        with self.lock:
            self.faults[fault] += 1

    def copy(self) -> "DiskCounters":
        with self.lock:
            return replace(self, faults=self.faults.copy(), lock=threading.Lock())


@dataclass(frozen=True, slots=True)
class DiskStats:
    """The store at one moment.

    used_bytes: of this model's folder, when it was last measured; shared_bytes: of all folders.
    read_rate: bytes a second; None before anything was read.
    write_fault: why the last write failed; None when the last write succeeded.
    is_day_spent: nothing is accepted because today's budget has been written.
    ended_threads: names of threads that have died. Nothing is written, or less is read, until the
        store is opened again.
    """

    counters: DiskCounters
    entries: int
    used_bytes: int
    shared_bytes: int
    buffered_bytes: int
    read_rate: float | None
    write_fault: Fault | None = None
    is_day_spent: bool = False
    ended_threads: tuple[str, ...] = ()
