"""A disk that lies, fails or is full costs what was on it, and never a wrong byte."""

import errno
import os
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.tier.disk.index import Index, _faults_told_apart
from kvstore.tier.reader import READERS
from kvstore.tier.record import Record
from kvstore.tier.tier import DiskTier
from kvstore.tier.types import Entry, Extent, Fault, ReadFailure, TierError
from tests.tier_harness import (
    LIMITS,
    PATIENCE,
    Chain,
    FaultyFiles,
    flip,
    read,
    segment_files,
    stored,
)

ENTRY = 40_960
CHAIN = Chain("one", 20)


@pytest.fixture
def files() -> FaultyFiles:
    return FaultyFiles()


@pytest.fixture
def tier(tmp_path: Path, files: FaultyFiles) -> Iterator[DiskTier]:
    tier = DiskTier.open(tmp_path, "model", LIMITS, files)
    yield tier
    files.heal()
    tier.close()


def out_of_memory(record: Record, payload: memoryview) -> None:
    raise MemoryError


def fails_at(tier: DiskTier, count: int, fault: Fault) -> None:
    """So many entries are read, then the fault; they remain, and what fell can be stored anew."""
    entries, failure = read(tier, CHAIN.names)
    assert failure == ReadFailure(count, fault)
    assert entries == list(CHAIN.extent().entries[:count])
    assert tier.known(CHAIN.names) == tier.held(CHAIN.names) == count
    assert tier.stats().counters.faults == ((fault, 1),)
    stored(tier, CHAIN.extent(count))
    assert read(tier, CHAIN.names) == (list(CHAIN.extent().entries), None)


def test_a_flipped_bit(tmp_path: Path, tier: DiskTier) -> None:
    stored(tier, CHAIN.extent())
    flip(segment_files(tmp_path)[0], 7 * ENTRY + 1234)
    fails_at(tier, 7, Fault.CHECKSUM)


def test_a_truncated_segment(tmp_path: Path, tier: DiskTier) -> None:
    """As by a power loss: the file has a hole where its end was."""
    stored(tier, CHAIN.extent())
    os.truncate(segment_files(tmp_path)[0], 7 * ENTRY + 100)
    fails_at(tier, 7, Fault.SHORT_READ)


def test_a_segment_that_is_not_there_was_evicted_by_another_process(tmp_path: Path) -> None:
    tier = DiskTier.open(tmp_path, "model", replace(LIMITS, segment_bytes=10 * ENTRY))
    stored(tier, CHAIN.extent())
    segment_files(tmp_path)[1].unlink()
    assert read(tier, CHAIN.names) == (
        list(CHAIN.extent().entries[:10]),
        ReadFailure(10, Fault.GONE),
    )
    assert tier.known(CHAIN.names) == tier.held(CHAIN.names) == 10
    assert tier.stats().counters.faults == ()
    stored(tier, CHAIN.extent(10))
    assert read(tier, CHAIN.names) == (list(CHAIN.extent().entries), None)
    tier.close()


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE])
def test_a_disk_that_cannot_read(tier: DiskTier, files: FaultyFiles, code: int) -> None:
    stored(tier, CHAIN.extent())
    files.fail("read", code)
    assert read(tier, CHAIN.names) == ([], ReadFailure(0, Fault.IO))
    files.heal()
    assert tier.known(CHAIN.names) == 0


def test_too_few_descriptors_forget_nothing(tier: DiskTier, files: FaultyFiles) -> None:
    stored(tier, CHAIN.extent())
    files.fail("read", errno.EMFILE)
    assert read(tier, CHAIN.names) == ([], ReadFailure(0, Fault.RESOURCES))
    files.heal()
    assert read(tier, CHAIN.names)[1] is None


def test_too_little_memory_ends_no_reader(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that reads ends with a failure each time, more often than there are readers."""
    stored(tier, CHAIN.extent())
    with monkeypatch.context() as little:
        little.setattr(Record, "cut", out_of_memory)
        for _ in range(READERS + 1):
            assert read(tier, CHAIN.names) == ([], ReadFailure(0, Fault.RESOURCES))
    assert read(tier, CHAIN.names)[1] is None


def test_too_little_memory_does_not_end_the_writer(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an entry had is read when it comes again with more."""
    first, more = (Entry(CHAIN.names[0], 16, parts) for parts in ((b"a", None), (None, b"b")))
    stored(tier, Extent(CHAIN.root, CHAIN.root, (first,)))
    with monkeypatch.context() as little:
        little.setattr(Record, "cut", out_of_memory)
        assert tier.offer(Extent(CHAIN.root, CHAIN.root, (more,)))
        assert tier.flush(PATIENCE)
    assert tier.stats().counters.faults == ((Fault.RESOURCES, 1),)
    tier.upkeep()
    assert tier.flush(PATIENCE)
    stored(tier, Extent(CHAIN.root, CHAIN.root, (more,)))
    assert read(tier, CHAIN.names[:1])[0] == [Entry(CHAIN.names[0], 16, (b"a", b"b"))]


@pytest.mark.parametrize(
    ("method", "code", "fault"),
    [
        ("write", errno.ENOSPC, Fault.NO_SPACE),
        ("write", errno.EIO, Fault.IO),
        ("write", errno.EROFS, Fault.READ_ONLY),
        ("write", errno.EACCES, Fault.READ_ONLY),
        ("index", errno.ENOSPC, Fault.NO_SPACE),
        ("index", errno.EIO, Fault.IO),
        ("index", errno.EROFS, Fault.READ_ONLY),
        ("disk", errno.EIO, Fault.IO),
    ],
)
def test_a_disk_that_cannot_write(
    tmp_path: Path, files: FaultyFiles, method: str, code: int, fault: Fault
) -> None:
    tier = DiskTier.open(tmp_path, "model", LIMITS, files)
    stored(tier, CHAIN.extent(0, 5))
    path_room = tier.path_room(CHAIN.names[4])
    files.fail(method, code)
    assert tier.offer(CHAIN.extent(5, 10))
    tier.flush(PATIENCE)
    assert tier.stats().counters.faults == ((fault, 1),)
    assert tier.path_room(CHAIN.names[4]) == path_room > 0
    assert tier.held(CHAIN.names) == 5
    assert [path.stat().st_size for path in segment_files(tmp_path)] == [5 * ENTRY]
    assert tier.room == 0
    assert not tier.offer(CHAIN.extent(5, 10))
    assert read(tier, CHAIN.names[:5])[1] is None
    files.heal()
    tier.upkeep()
    assert tier.flush(PATIENCE)
    stored(tier, CHAIN.extent(5))
    assert read(tier, CHAIN.names) == (list(CHAIN.extent().entries), None)
    tier.close()
    tier = DiskTier.open(tmp_path, "model", LIMITS)
    assert read(tier, CHAIN.names) == (list(CHAIN.extent().entries), None)
    assert tier.stats().counters.faults == ()
    tier.close()


@pytest.mark.parametrize("method", ["write", "index"])
def test_what_could_not_be_written_is_unknown_after_a_restart(
    tmp_path: Path, files: FaultyFiles, method: str
) -> None:
    tier = DiskTier.open(tmp_path, "model", LIMITS, files)
    stored(tier, CHAIN.extent(0, 5))
    files.fail(method, errno.ENOSPC)
    tier.offer(CHAIN.extent(5, 10))
    tier.flush(PATIENCE)
    tier.close()
    tier = DiskTier.open(tmp_path, "model", LIMITS)
    assert tier.known(CHAIN.names) == 5
    assert tier.stats().counters.faults == ()
    tier.close()


def test_what_waits_behind_a_failure_is_not_stored_without_its_parent(
    tier: DiskTier, files: FaultyFiles
) -> None:
    files.fail("write", errno.ENOSPC)
    for start in (0, 5, 10):
        tier.offer(CHAIN.extent(start, start + 5))
    tier.flush(PATIENCE)
    assert tier.held(CHAIN.names) == tier.known(CHAIN.names) == 0


def test_an_index_that_cannot_forget_is_asked_again(tmp_path: Path, files: FaultyFiles) -> None:
    tier = DiskTier.open(tmp_path, "model", LIMITS, files)
    stored(tier, CHAIN.extent())
    files.fail("index", errno.ENOSPC)
    tier.forget(CHAIN.names[4])
    tier.flush(PATIENCE)
    assert tier.known(CHAIN.names) == 4
    files.heal()
    tier.upkeep()
    tier.flush(PATIENCE)
    tier.close()
    tier = DiskTier.open(tmp_path, "model", LIMITS)
    assert tier.known(CHAIN.names) == 4
    tier.close()


def test_a_cleared_tier_stays_so_although_the_index_could_not_forget(
    tmp_path: Path, files: FaultyFiles
) -> None:
    tier = DiskTier.open(tmp_path, "model", LIMITS, files)
    stored(tier, CHAIN.extent())
    files.fail("index", errno.ENOSPC)
    tier.clear()
    tier.close()
    assert not segment_files(tmp_path)
    tier = DiskTier.open(tmp_path, "model", LIMITS)
    assert tier.known(CHAIN.names) == 0
    tier.close()


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_a_folder_that_cannot_be_used_is_refused_in_words(
    tmp_path: Path, files: FaultyFiles, code: int
) -> None:
    files.fail("connect", code)
    with pytest.raises(TierError, match=f"cannot use the disk cache .*: {os.strerror(code)}"):
        DiskTier.open(tmp_path, "model", LIMITS, files)
    files.heal()
    DiskTier.open(tmp_path, "model", LIMITS, files).close()  # the lock was released


def test_a_file_in_the_folders_place_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TierError, match="File exists"):
        DiskTier.open(tmp_path / "file", "model", LIMITS)


@pytest.mark.parametrize("damage", ["remove", "truncate"])
def test_at_the_start_what_lacks_its_bytes_is_dropped_with_its_descendants(
    tmp_path: Path, damage: str
) -> None:
    limits = replace(LIMITS, segment_bytes=5 * ENTRY)
    tier = DiskTier.open(tmp_path, "model", limits)
    stored(tier, CHAIN.extent())
    tier.close()
    victim = segment_files(tmp_path)[1]
    if damage == "remove":
        victim.unlink()
    else:
        os.truncate(victim, ENTRY)
    tier = DiskTier.open(tmp_path, "model", limits)
    n_left = 5 if damage == "remove" else 6
    faults = () if damage == "remove" else ((Fault.SHORT_READ, 10 - n_left),)
    assert tier.known(CHAIN.names) == n_left
    assert tier.stats().entries == n_left
    assert tier.stats().counters.faults == faults
    assert len(segment_files(tmp_path)) == (1 if damage == "remove" else 2)
    stored(tier, CHAIN.extent(n_left))
    assert read(tier, CHAIN.names) == (list(CHAIN.extent().entries), None)
    tier.close()


def test_an_index_that_is_there_is_opened_without_a_write(tmp_path: Path) -> None:
    """The disk may be full: what is on it is read all the same."""
    tier = DiskTier.open(tmp_path, "model", LIMITS)
    stored(tier, CHAIN.extent())
    tier.close()
    index = next(tmp_path.rglob("index.sqlite"))
    before = index.read_bytes()
    tier = DiskTier.open(tmp_path, "model", LIMITS)
    assert read(tier, CHAIN.names)[1] is None
    assert index.with_name("index.sqlite-wal").read_bytes() == b""
    assert index.read_bytes() == before
    tier.close()


@pytest.mark.parametrize(
    "code",
    [
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR_WRITE,
        sqlite3.SQLITE_READONLY_DIRECTORY,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_PERM,
    ],
)
def test_an_index_that_the_disk_keeps_from_us_is_not_begun_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    tier = DiskTier.open(tmp_path, "model", LIMITS)
    stored(tier, CHAIN.extent())
    tier.close()

    def fails(index: Index) -> Iterator[Record]:
        error = sqlite3.OperationalError("what sqlite says")
        error.sqlite_errorcode = code
        with _faults_told_apart():
            raise error
        yield

    with monkeypatch.context() as failing:
        failing.setattr(Index, "load", fails)
        with pytest.raises(TierError, match=r"cannot use the index .*: what sqlite says"):
            DiskTier.open(tmp_path, "model", LIMITS)
    tier = DiskTier.open(tmp_path, "model", LIMITS)
    assert read(tier, CHAIN.names) == (list(CHAIN.extent().entries), None)
    tier.close()
