"""What tests of the disk store share: chains of entries, files that fail, reads to wait for."""

import os
import queue
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from kvstore.disk.catalog import Reservation
from kvstore.disk.extent import STAT_BLOCK, FileUse, OsFiles, read_header
from kvstore.disk.store import DiskStore
from kvstore.disk.types import (
    MIB,
    Buffer,
    DiskLimits,
    Entry,
    EntryHead,
    ReadFailure,
    ReadRun,
)
from kvstore.tokens import Digest

Parts = tuple[Buffer | None, ...]

BLOCK = 16
LIMITS = DiskLimits(max_bytes=16 * MIB, extent_bytes=MIB, least_free=0.0)
DAEMON = "1 tests"
"""Whose tiers share a directory."""

PATIENCE = 60.0
"""Seconds after which a test has failed; nothing takes that long."""


@dataclass(frozen=True, slots=True)
class Extent:
    """A run of entries of one path, each the parent of the next; `parent` is that of the first."""

    root: Digest
    parent: Digest
    entries: tuple[Entry, ...]

    @property
    def n_bytes(self) -> int:
        return sum(entry.n_bytes for entry in self.entries)


class Chain:
    """Entries that follow each other from a root, all bytes made of their names."""

    def __init__(self, seed: str, n_entries: int, n_bytes: int = 32_768, space: str = "a") -> None:
        self.root = Digest(blake3(space.encode()).digest())
        parent = Digest(blake3(self.root + seed.encode()).digest())
        self.names = list[Digest]()
        for _ in range(n_entries):
            parent = Digest(blake3(parent).digest())
            self.names.append(parent)
        self.n_bytes = n_bytes

    def extent(self, start: int = 0, stop: int | None = None) -> Extent:
        parent = self.names[start - 1] if start else self.root
        names = self.names[start:stop]
        return Extent(self.root, parent, tuple(entry(name, self.n_bytes) for name in names))


def entry(name: Digest, n_bytes: int) -> Entry:
    """With two parts, the second a fourth of the first, and one that is not there."""
    return Entry(name, BLOCK, (payload(name, n_bytes), None, payload(name[:8], n_bytes // 4)))


def payload(seed: bytes, n_bytes: int) -> bytes:
    return blake3(seed).digest(length=n_bytes)


def plain(found: Entry) -> Entry:
    """With parts that can be compared."""
    parts = tuple(None if part is None else bytes(part) for part in found.parts)
    return Entry(found.block_hash, found.n_tokens, parts)


def offer(tier: DiskStore, extent: Extent) -> bool:
    """Whether all of it has been accepted that is not stored already; else nothing is."""
    parent, reservations = extent.parent, list[tuple[Reservation, Parts]]()
    for entry in extent.entries:
        head = head_of(entry)
        if tier.held_entry(entry.block_hash) is None:
            reservation = tier.reserve(extent.root, parent, head)
            if reservation is None:
                for each, _ in reservations:
                    tier.cancel(each)
                return False
            reservations.append((reservation, entry.parts))
        parent = entry.block_hash
    for reservation, parts in reservations:
        tier.write(reservation, parts)
    return True


def head_of(entry: Entry) -> EntryHead:
    return EntryHead(entry.block_hash, entry.n_tokens, entry.sizes)


def stored(tier: DiskStore, *extents: Extent) -> None:
    for extent in extents:
        assert offer(tier, extent)
    assert tier.flush(PATIENCE)


def read(tier: DiskStore, names: Sequence[Digest]) -> tuple[list[Entry], ReadFailure | None]:
    """What is delivered, in order, and what went wrong."""
    arrived = queue.SimpleQueue[ReadRun | ReadFailure]()
    ticket = tier.read(names, arrived.put)
    entries = list[Entry]()
    while len(entries) < len(names):
        found = arrived.get(timeout=PATIENCE)
        assert found.start == len(entries)
        if isinstance(found, ReadFailure):
            return entries, found
        entries += map(plain, found.entries)
        ticket.consumed(found.n_bytes)
    return entries, None


class FaultyFiles(OsFiles):
    """Calls of the named methods fail with an errno.

    With a `capacity`, others have left so many bytes of a disk of 100 MiB for the tier.
    """

    def __init__(self) -> None:
        self.failing: dict[str, int] = {}
        self.capacity: int | None = None
        self.measured = Counter[Path]()  # how often each folder was

    def fail(self, method: str, code: int) -> None:
        self.failing[method] = code

    def heal(self) -> None:
        self.failing.clear()

    def write(self, path: Path, buffers: Sequence[Buffer]) -> None:
        if "write" in self.failing:  # half of it arrives, as when a disk becomes full
            super().write(path, buffers[: len(buffers) // 2])
        self._may_fail("write", path)
        super().write(path, buffers)

    def read(self, path: Path, offset: int, n_bytes: int) -> memoryview:
        self._may_fail("read", path)
        return super().read(path, offset, n_bytes)

    def remove(self, path: Path) -> None:
        self._may_fail("remove", path)
        super().remove(path)

    def scan(self, folder: Path) -> list[FileUse]:
        self._may_fail("scan", folder)
        return super().scan(folder)

    def names(self, folder: Path) -> set[str]:
        self._may_fail("scan", folder)
        self.measured[folder] += 1
        return super().names(folder)

    def disk(self, folder: Path) -> tuple[int, int]:
        self._may_fail("disk", folder)
        if self.capacity is None:
            return super().disk(folder)
        return max(0, self.capacity - allocated(folder)), 100 * MIB

    def _may_fail(self, method: str, path: Path) -> None:
        if method in self.failing:
            raise OSError(self.failing[method], os.strerror(self.failing[method]), str(path))


def extent_files(directory: Path) -> list[Path]:
    """In the order in which they were last used."""
    return sorted(directory.rglob("*.kv"), key=lambda path: path.stat().st_mtime_ns)


def offset_of(path: Path, number: int) -> int:
    """Where the payload of an extent's entry begins."""
    return read_header(OsFiles(), path).entries[number].offset


def flip(path: Path, offset: int) -> None:
    """One bit of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 16]))


def allocated(directory: Path) -> int:
    """The bytes of disk that `du` counts. Files and folders may go away meanwhile."""
    n_blocks = 0
    for folder, _, names in os.walk(directory):
        for path in (folder, *(os.path.join(folder, name) for name in names)):
            with suppress(FileNotFoundError):
                n_blocks += os.stat(path).st_blocks
    return n_blocks * STAT_BLOCK
