"""A disk that lies, fails or is full costs what was on it, and never a wrong byte."""

import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.disk.extent import DamagedHeader, OsFiles, read_header
from kvstore.disk.store import DiskStore
from kvstore.disk.types import MIB, Buffer, DiskError, Fault, ReadFailure
from tests.disk_store_harness import (
    LIMITS,
    PATIENCE,
    Chain,
    FaultyFiles,
    allocated,
    extent_files,
    flip,
    offer,
    offset_of,
    read,
    stored,
)

ENTRY = 40_960
CHAIN = Chain("one", 20)
FIVES = replace(LIMITS, extent_bytes=5 * ENTRY)
"""Four extents."""


@pytest.fixture
def files() -> FaultyFiles:
    return FaultyFiles()


@pytest.fixture
def tier(tmp_path: Path, files: FaultyFiles) -> Iterator[DiskStore]:
    tier = DiskStore.open(tmp_path, "model", FIVES, files)
    yield tier
    files.heal()
    tier.close()


def second_extent(directory: Path) -> Path:
    """A parent was used later than its children."""
    return extent_files(directory)[-2]


def fails_at(tier: DiskStore, count: int, fault: Fault) -> None:
    """Only so many entries are read. Their extent goes, with all below, and can be stored anew."""
    entries, failure = read(tier, CHAIN.names)
    assert failure == ReadFailure(count, fault)
    assert entries == list(CHAIN.extent().entries[:count])
    assert tier.known(CHAIN.names) == tier.held(CHAIN.names) == 5
    assert tier.stats().counters.faults == {fault: 1}
    stored(tier, CHAIN.extent(5))
    assert read(tier, CHAIN.names) == (list(CHAIN.extent().entries), None)


def test_a_flipped_bit(tmp_path: Path, tier: DiskStore) -> None:
    stored(tier, CHAIN.extent())
    victim = second_extent(tmp_path)
    flip(victim, offset_of(victim, 2) + 1234)
    fails_at(tier, 7, Fault.CHECKSUM)


def test_a_truncated_extent(tmp_path: Path, tier: DiskStore) -> None:
    """As by a power loss."""
    stored(tier, CHAIN.extent())
    victim = second_extent(tmp_path)
    os.truncate(victim, offset_of(victim, 2) + 100)
    fails_at(tier, 7, Fault.SHORT_READ)


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE])
def test_a_disk_that_cannot_read(tier: DiskStore, files: FaultyFiles, code: int) -> None:
    stored(tier, CHAIN.extent())
    files.fail("read", code)
    assert read(tier, CHAIN.names) == ([], ReadFailure(0, Fault.IO))
    files.heal()
    assert tier.known(CHAIN.names) == 0


def test_too_few_descriptors_forget_nothing(tier: DiskStore, files: FaultyFiles) -> None:
    stored(tier, CHAIN.extent())
    files.fail("read", errno.EMFILE)
    assert read(tier, CHAIN.names) == ([], ReadFailure(0, Fault.RESOURCES))
    files.heal()
    assert read(tier, CHAIN.names)[1] is None


@pytest.mark.parametrize(
    ("method", "code", "fault"),
    [
        ("write", errno.ENOSPC, Fault.NO_SPACE),
        ("write", errno.EIO, Fault.IO),
        ("write", errno.EROFS, Fault.READ_ONLY),
        ("write", errno.EACCES, Fault.READ_ONLY),
        ("disk", errno.EIO, Fault.IO),
    ],
)
def test_a_disk_that_cannot_write(
    tmp_path: Path, files: FaultyFiles, method: str, code: int, fault: Fault
) -> None:
    tier = DiskStore.open(tmp_path, "model", LIMITS, files)
    stored(tier, CHAIN.extent(0, 5))
    path_room = tier.path_room(CHAIN.names[4])
    files.fail(method, code)
    assert offer(tier, CHAIN.extent(5, 10))
    tier.flush(PATIENCE)
    assert tier.stats().counters.faults == {fault: 1}
    assert tier.path_room(CHAIN.names[4]) == path_room > 0
    assert tier.held(CHAIN.names) == 5
    assert len(extent_files(tmp_path)) == 1
    assert not list(tmp_path.rglob("*.tmp"))
    assert tier.room == 0
    assert not offer(tier, CHAIN.extent(5, 10))
    assert read(tier, CHAIN.names[:5])[1] is None
    files.heal()
    tier.upkeep()
    assert tier.flush(PATIENCE)
    stored(tier, CHAIN.extent(5))
    assert read(tier, CHAIN.names) == (list(CHAIN.extent().entries), None)
    tier.close()
    tier = DiskStore.open(tmp_path, "model", LIMITS)
    assert read(tier, CHAIN.names) == (list(CHAIN.extent().entries), None)
    assert tier.stats().counters.faults == {}
    tier.close()


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_a_folder_that_cannot_be_used_is_refused_in_words(
    tmp_path: Path, files: FaultyFiles, code: int
) -> None:
    files.fail("scan", code)
    with pytest.raises(DiskError, match=f"cannot use the disk cache .*: {os.strerror(code)}"):
        DiskStore.open(tmp_path, "model", LIMITS, files)
    files.heal()
    DiskStore.open(tmp_path, "model", LIMITS, files).close()  # the lock was released


def test_a_file_in_the_folders_place_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DiskError, match="File exists"):
        DiskStore.open(tmp_path / "file", "model", LIMITS)


def test_a_disk_that_can_be_written_again_is_noticed_before_anything_is(
    tier: DiskStore, files: FaultyFiles
) -> None:
    """Or `/health` of an idle daemon would stay degraded."""
    files.fail("write", errno.EROFS)
    offer(tier, CHAIN.extent())
    for _ in range(2):
        tier.upkeep()
        assert tier.flush(PATIENCE)
        assert tier.stats().write_fault is Fault.READ_ONLY
    files.heal()
    tier.upkeep()
    assert tier.flush(PATIENCE)
    assert tier.stats().write_fault is None


def test_what_could_not_be_deleted_is_tried_again(
    tmp_path: Path, tier: DiskStore, files: FaultyFiles
) -> None:
    stored(tier, CHAIN.extent())
    files.fail("remove", errno.EIO)
    tier.clear()
    assert tier.flush(PATIENCE)
    assert tier.known(CHAIN.names) == 0
    assert len(extent_files(tmp_path)) == 4
    files.heal()
    tier.upkeep()
    assert tier.flush(PATIENCE)
    assert extent_files(tmp_path) == []


def test_where_nothing_can_be_deleted_little_is_evicted(
    tmp_path: Path, tier: DiskStore, files: FaultyFiles
) -> None:
    """It would make no room, and what is stored can still be read."""
    stored(tier, CHAIN.extent())
    files.capacity = allocated(tmp_path) + MIB
    files.fail("remove", errno.EROFS)
    offer(tier, Chain("two", 5).extent())
    assert tier.flush(PATIENCE)
    assert tier.known(CHAIN.names) == 15
    assert tier.stats().counters.evicted_entries == 5
    assert read(tier, CHAIN.names[:15])[1] is None
    assert tier.room == 0, "nothing is accepted that would evict more"


def test_what_was_cleared_while_it_was_written_is_deleted_when_it_can_be(
    tmp_path: Path, tier: DiskStore, files: FaultyFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = files.create

    def create_and_clear(path: Path, buffers: Sequence[Buffer]) -> int:
        n_bytes = create(path, buffers)
        tier.clear()
        return n_bytes

    monkeypatch.setattr(files, "create", create_and_clear)
    files.fail("remove", errno.EIO)
    assert offer(tier, CHAIN.extent())
    assert tier.flush(PATIENCE)
    assert extent_files(tmp_path)
    files.heal()
    tier.upkeep()
    assert tier.flush(PATIENCE)
    assert extent_files(tmp_path) == []


@pytest.mark.parametrize("damage", ["remove", "truncate", "flip a header's bit", "write nonsense"])
def test_at_the_start_what_is_damaged_is_removed_with_what_is_below(
    tmp_path: Path, damage: str
) -> None:
    tier = DiskStore.open(tmp_path, "model", FIVES)
    stored(tier, CHAIN.extent())
    tier.close()
    victim = second_extent(tmp_path)
    match damage:
        case "remove":
            victim.unlink()
            faults = {}
        case "truncate":
            os.truncate(victim, offset_of(victim, 2))
            faults = {Fault.SHORT_READ: 1}
        case "write nonsense":
            victim.write_bytes(b"nonsense" * 4096)
            faults = {Fault.HEADER: 1}
        case _:
            flip(victim, 100)
            faults = {Fault.HEADER: 1}
    tier = DiskStore.open(tmp_path, "model", FIVES)
    assert tier.known(CHAIN.names) == tier.stats().entries == 5
    assert tier.stats().counters.faults == faults
    assert len(extent_files(tmp_path)) == 1
    stored(tier, CHAIN.extent(5))
    assert read(tier, CHAIN.names) == (list(CHAIN.extent().entries), None)
    tier.close()


def test_every_bit_of_a_header_is_covered(tmp_path: Path) -> None:
    tier = DiskStore.open(tmp_path, "model", LIMITS)
    stored(tier, Chain("short", 2, 64).extent())
    tier.close()
    [path] = extent_files(tmp_path)
    sound = path.read_bytes()
    for offset in range(offset_of(path, 0)):
        flip(path, offset)
        with pytest.raises(DamagedHeader):
            read_header(OsFiles(), path)
        path.write_bytes(sound)
    assert read_header(OsFiles(), path).end == len(sound)


def test_what_cannot_be_read_is_logged(
    tier: DiskStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stored(tier, CHAIN.extent())
    damaged = second_extent(tmp_path)
    flip(damaged, offset_of(damaged, 0))
    read(tier, CHAIN.names)
    assert f"{damaged.name} cannot be read: checksum" in caplog.text


@pytest.mark.parametrize("name", ["9" * 20, "٤" * 8, "1"])
def test_a_file_that_is_not_named_like_an_extent_is_no_matter(tmp_path: Path, name: str) -> None:
    tier = DiskStore.open(tmp_path, "model", LIMITS)
    tier.close()
    (next(tmp_path.glob("v4-*")) / f"{name}.kv").touch()
    tier = DiskStore.open(tmp_path, "model", LIMITS)
    stored(tier, CHAIN.extent())
    assert read(tier, CHAIN.names)[1] is None
    tier.close()
