"""Work on a cache directory without a model: measure it, verify it, clear it."""

import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvstore.tier.catalog import Catalog
from kvstore.tier.disk.files import OsFiles
from kvstore.tier.disk.folder import (
    LOCK,
    fingerprint_of,
    folders,
    in_words,
    join,
    new_daemon,
    write_lock,
)
from kvstore.tier.disk.index import Index
from kvstore.tier.disk.segments import Segments
from kvstore.tier.record import Record
from kvstore.tier.types import TierError


@dataclass(frozen=True, slots=True)
class FolderUse:
    """One fingerprint's folder. `allocated_bytes` are those that `du` counts."""

    folder: Path
    fingerprint: str
    n_segments: int
    allocated_bytes: int


@dataclass(frozen=True, slots=True)
class FolderCheck:
    """What reading all of a folder found.

    `damaged` are entries whose bytes are not what was written; `orphans` are entries without a path
    to their root. Both are dropped when somebody comes upon them. What other models have evicted is
    in the index until then, and counts for nothing here. `problem` is why the index could not be
    read, if so.
    """

    folder: Path
    fingerprint: str
    entries: int
    n_bytes: int
    damaged: tuple[str, ...]
    orphans: int
    problem: str | None

    @property
    def is_sound(self) -> bool:
        return not self.damaged and not self.orphans and self.problem is None


def du(directory: Path) -> list[FolderUse]:
    """While a daemon runs, too. Raises TierError."""
    with in_words(directory):
        return [
            FolderUse(
                folder,
                fingerprint_of(folder),
                len(Segments(OsFiles(), folder, 0).numbers()),
                OsFiles().allocated(folder),
            )
            for folder in _folders_in(directory)
        ]


def verify(directory: Path) -> Iterator[FolderCheck]:
    """Read everything and change nothing. Raises TierError, also when a daemon runs."""
    with _locked(directory):
        for folder in _folders_in(directory):
            yield _check(folder)


def clear(directory: Path) -> int:
    """Remove what is stored, of all fingerprints; how many bytes of disk that frees. Raises
    TierError, also when a daemon runs.
    """
    with _locked(directory):
        found = du(directory)
        for use in found:
            OsFiles().remove(use.folder)
        return sum(use.allocated_bytes for use in found)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    with in_words(directory):
        _folders_in(directory)
        with ExitStack() as held:
            writing = write_lock(directory)
            held.callback(writing.release)
            held.callback(join(directory, new_daemon(), writing).release)
            yield


def _folders_in(directory: Path) -> list[Path]:
    found = folders(directory) if directory.is_dir() else []
    if not found and not (directory / LOCK).is_file():
        raise TierError(f"there is no disk cache in {directory}")
    return found


def _check(folder: Path) -> FolderCheck:
    segments = Segments(OsFiles(), folder, 0)
    try:
        index = Index(OsFiles(), folder)
        try:
            records = list(index.load())
        finally:
            index.close()
    except sqlite3.Error as error:
        return FolderCheck(folder, fingerprint_of(folder), 0, 0, (), 0, str(error))
    catalog = Catalog()
    orphans = len(catalog.fill(records))
    lost = segments.lost(catalog.segments())
    evicted = {record for number in lost for record in catalog.remove_segment(number)}
    left = sorted(set(records) - evicted, key=lambda it: (it.segment, it.offset))
    return FolderCheck(
        folder,
        fingerprint_of(folder),
        entries=len(left),
        n_bytes=sum(record.n_bytes for record in left),
        damaged=tuple(it.block_hash.hex() for it in left if not _is_sound(it, segments)),
        orphans=orphans,
        problem=None,
    )


def _is_sound(record: Record, segments: Segments) -> bool:
    try:
        if not record.is_sane or record.end > segments.size(record.segment):
            return False
        found = segments.read(record.segment, record.offset, record.n_bytes)
    except OSError:
        return False
    return record.cut(found) is not None
