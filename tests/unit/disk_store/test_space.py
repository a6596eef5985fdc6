"""What `du` counts never exceeds the limit, and what is used least goes first."""

import errno
import os
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from kvstore.disk import space, writer
from kvstore.disk import store as maintenance
from kvstore.disk.store import DiskStore
from kvstore.disk.types import MIB
from tests.disk_store_harness import (
    DAEMON,
    LIMITS,
    PATIENCE,
    Chain,
    FaultyFiles,
    allocated,
    offer,
    read,
    stored,
)


def test_what_is_used_stays_and_what_is_not_goes(tmp_path: Path) -> None:
    clock = count(1_000_000)
    tier = DiskStore.open(tmp_path, "model", LIMITS, clock=lambda: float(next(clock)))
    read_often, touched, idle = (Chain(name, 25) for name in ("read", "touched", "idle"))
    stored(tier, idle.extent(), read_often.extent(), touched.extent())
    for number in range(40):
        stored(tier, Chain(f"chain {number}", 25).extent())
        assert read(tier, read_often.names)[1] is None
        tier.touch(touched.names)
    assert tier.known(touched.names) == tier.known(read_often.names) == 25
    assert tier.known(idle.names) == 0
    tier.close()


def test_a_parent_is_kept_while_a_child_is_used(tmp_path: Path) -> None:
    """A conversation that grows stands in many segments; its first blocks are its oldest."""
    chain = Chain("conversation", 10)
    tier = DiskStore.open(tmp_path, "model", LIMITS)
    for turn in range(5):
        stored(tier, chain.extent(2 * turn, 2 * turn + 2), Chain(f"other {turn}", 25).extent())
    for number in range(40):
        stored(tier, Chain(f"more {number}", 25).extent())
        assert read(tier, chain.names[-1:])[1] is None
    assert tier.known(chain.names) == 10
    assert read(tier, chain.names)[1] is None
    tier.close()


def test_use_is_remembered_after_a_restart(tmp_path: Path) -> None:
    clock = count(1_000_000)
    tier = DiskStore.open(tmp_path, "model", LIMITS, clock=lambda: float(next(clock)))
    old, idle = Chain("old", 25), Chain("idle", 25)
    stored(tier, old.extent(), idle.extent())
    tier.touch(old.names)
    tier.close()
    tier = DiskStore.open(tmp_path, "model", LIMITS, clock=lambda: float(next(clock)))
    number = 0
    while tier.known(idle.names):
        stored(tier, Chain(f"chain {number}", 5).extent())
        number += 1
    assert tier.known(old.names) == 25
    tier.close()


def test_what_others_keep_beside_it_is_never_removed(tmp_path: Path) -> None:
    mine = [tmp_path / name / "file" for name in ("v4-website", "v1-0123", "notes")]
    for file in mine:
        file.parent.mkdir()
        file.write_text("mine")
    foreign = DiskStore.open(tmp_path, "another model", LIMITS)
    stored(foreign, Chain("foreign", 25).extent())
    foreign.close()
    tier = DiskStore.open(tmp_path, "model", LIMITS)
    for number in range(30):
        stored(tier, Chain(f"chain {number}", 25).extent())
    assert [use.fingerprint for use in maintenance.du(tmp_path)] == ["model"]
    assert [file.read_text() for file in mine] == ["mine"] * 3
    tier.close()


def test_files_of_other_programs_count_for_nothing(tmp_path: Path) -> None:
    """The directory may be somebody's home, with far more in it than the limit."""
    photos = tmp_path / "photos"
    photos.mkdir()
    for file in (photos / "one", tmp_path / "archive"):
        file.write_bytes(bytes(LIMITS.max_bytes))
    tier = DiskStore.open(tmp_path, "model", LIMITS)
    chains = [Chain(f"chain {number}", 25) for number in range(5)]
    stored(tier, *(chain.extent() for chain in chains))
    tier.upkeep()
    assert tier.flush(PATIENCE)
    assert [tier.known(chain.names) for chain in chains] == [25] * 5
    assert 5 * 25 * 40_960 < tier.stats().shared_bytes < LIMITS.max_bytes
    tier.close()


def test_other_models_folders_are_measured_once_for_an_extent_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock under which that is done is shared by all models."""
    monkeypatch.setattr(writer, "UPKEEP_SECONDS", 1e6)  # upkeep measures, too
    files = FaultyFiles()
    models = {name: DiskStore.open(tmp_path, name, LIMITS, daemon=DAEMON) for name in ("a", "b")}
    for model in models.values():
        stored(model, Chain("chain", 25).extent())
    tier = DiskStore.open(tmp_path, "c", LIMITS, files, daemon=DAEMON)
    files.measured.clear()
    stored(tier, Chain("chain", 25).extent())
    assert set(files.measured) < {use.folder for use in maintenance.du(tmp_path)}  # not its own
    assert set(files.measured.values()) <= {1}
    for each in (*models.values(), tier):
        each.close()


def test_a_folder_of_roots_beside_it_keeps_nothing_from_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every ext4 has one at its top, which is a fine place for a cache."""
    (tmp_path / "lost+found").mkdir()
    look = os.scandir

    def look_as_nobody(folder: Path) -> Any:
        if Path(folder).name == "lost+found":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
        return look(folder)

    monkeypatch.setattr(os, "scandir", look_as_nobody)
    tier = DiskStore.open(tmp_path, "model", LIMITS)
    stored(tier, Chain("one", 10).extent())
    assert tier.stats().counters.faults == {}
    tier.close()


def test_half_the_limit_after_a_restart_shrinks_at_once(tmp_path: Path) -> None:
    large = replace(LIMITS, max_bytes=32 * MIB)
    tier = DiskStore.open(tmp_path, "model", large)
    chains = [Chain(f"chain {number}", 25) for number in range(24)]
    stored(tier, *(chain.extent() for chain in chains))
    tier.close()
    assert allocated(tmp_path) > LIMITS.max_bytes
    tier = DiskStore.open(tmp_path, "model", LIMITS)
    assert allocated(tmp_path) <= LIMITS.max_bytes
    assert tier.known(chains[-1].names) == 25
    assert read(tier, chains[-1].names)[1] is None
    tier.close()


def test_the_disk_is_left_its_part(tmp_path: Path) -> None:
    """What is written then takes the place of what is used least."""
    files = FaultyFiles()
    files.capacity = 14 * MIB
    tier = DiskStore.open(tmp_path, "model", replace(LIMITS, least_free=0.05), files)
    chains = [Chain(f"chain {number}", 25) for number in range(11)]
    for chain in chains:
        stored(tier, chain.extent())
        assert allocated(tmp_path) <= files.capacity - 5 * MIB
    assert [tier.known(chains[number].names) for number in (0, 10)] == [0, 25]
    assert tier.stats().counters.faults == {}
    tier.close()


def test_on_a_disk_that_others_fill_nothing_goes_and_nothing_is_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor when it is opened; and when they make room it goes on."""
    files, limits = FaultyFiles(), replace(LIMITS, least_free=0.05)
    files.capacity = 50 * MIB
    tier = DiskStore.open(tmp_path, "model", limits, files)
    chains = [Chain(f"chain {number}", 25) for number in range(5)]
    stored(tier, *(chain.extent() for chain in chains))
    files.capacity = 0
    more = Chain("more", 25)
    stored(tier, more.extent())  # it is taken: nobody has looked at the disk
    assert tier.room == 0
    tier.upkeep()
    assert tier.flush(PATIENCE)
    assert not offer(tier, more.extent())
    assert caplog.text.count("while other programs fill the disk") == 1
    assert [read(tier, chain.names)[1] for chain in chains] == [None] * 5
    assert tier.stats().counters.faults == {}
    tier.close()
    tier = DiskStore.open(tmp_path, "model", limits, files)
    assert [read(tier, chain.names)[1] for chain in chains] == [None] * 5
    assert (tier.room, tier.known(more.names)) == (0, 0)
    files.capacity = 50 * MIB
    tier.upkeep()
    assert tier.flush(PATIENCE)
    stored(tier, more.extent())
    assert tier.stats().entries == 6 * 25
    tier.close()


def test_a_disk_that_other_programs_fill_makes_no_path_too_long(tmp_path: Path) -> None:
    files = FaultyFiles()
    files.capacity = 50 * MIB
    tier = DiskStore.open(tmp_path, "model", replace(LIMITS, least_free=0.05), files)
    chain = Chain("chain", 2)
    stored(tier, chain.extent())
    before = [tier.path_room(name) for name in (chain.root, *chain.names)]
    assert min(before) > 0
    files.capacity = 0
    tier.upkeep()
    assert tier.flush(PATIENCE)
    assert tier.room == 0
    assert [tier.path_room(name) for name in (chain.root, *chain.names)] == before
    tier.close()


def test_a_smaller_limit_holds_on_a_full_disk_too(tmp_path: Path) -> None:
    files = FaultyFiles()
    tier = DiskStore.open(tmp_path, "model", replace(LIMITS, max_bytes=32 * MIB))
    stored(tier, *(Chain(f"chain {number}", 25).extent() for number in range(24)))
    tier.close()
    files.capacity = 0
    DiskStore.open(tmp_path, "model", replace(LIMITS, least_free=0.05), files).close()
    assert allocated(tmp_path) <= LIMITS.max_bytes


@pytest.mark.parametrize("n_bytes", [32_768, 100_000, 700_000])
def test_models_that_start_find_room_in_a_full_directory(tmp_path: Path, n_bytes: int) -> None:
    """Their folders take blocks of their own, and nothing is evicted for their sake."""
    tier = DiskStore.open(tmp_path, "model", LIMITS, daemon=DAEMON)
    chains = [Chain(f"chain {number}", 1, n_bytes) for number in range(16 * MIB // n_bytes)]
    stored(tier, *(chain.extent() for chain in chains))
    held = [chain for chain in chains if tier.known(chain.names)]
    assert len(held) < len(chains)
    for number in range(8):
        DiskStore.open(tmp_path, f"other {number}", LIMITS, daemon=DAEMON).close()
        assert allocated(tmp_path) <= LIMITS.max_bytes
    tier.upkeep()
    assert tier.flush(PATIENCE)
    assert all(tier.known(chain.names) for chain in held)
    tier.close()


def test_what_is_larger_than_the_tier_is_refused(tmp_path: Path) -> None:
    tier = DiskStore.open(tmp_path, "model", LIMITS)
    chain = Chain("large", 1, 20 * MIB)
    assert not offer(tier, chain.extent())
    assert tier.flush(PATIENCE)
    assert tier.known(chain.names) == 0
    assert tier.stats().counters.faults == {}
    tier.close()


def test_the_end_of_a_long_path_does_not_push_its_beginning_out(tmp_path: Path) -> None:
    """Twice as long as there is room for, offered as often as it takes."""
    tier = DiskStore.open(tmp_path, "model", LIMITS)
    long, other = Chain("long", 800), Chain("other", 25)
    stored(tier, other.extent())
    for _ in range(3):
        start = tier.held(long.names)
        while start < 800 and offer(tier, long.extent(start, start + 5)):
            start += 5
            tier.flush(PATIENCE)
    kept = tier.known(long.names)
    assert kept * 40_960 > LIMITS.max_bytes // 2
    assert tier.stats().counters.written_bytes == (kept + 25) * 40_960  # each but once
    room = tier.path_room(long.names[kept - 1])
    assert 0 <= room < 5 * 40_960
    assert tier.path_room(long.root) == room + kept * 40_960
    tier.close()
    tier = DiskStore.open(tmp_path, "model", LIMITS)
    assert tier.path_room(long.names[kept - 1]) == room
    tier.close()


def test_a_path_on_its_way_is_as_long_as_one_that_is_stored(tmp_path: Path) -> None:
    tier = DiskStore.open(tmp_path, "model", LIMITS)
    chain = Chain("chain", 50)
    assert offer(tier, chain.extent())
    rooms = [tier.path_room(name) for name in chain.names]
    assert tier.flush(PATIENCE)
    assert rooms == [tier.path_room(name) for name in chain.names]
    assert rooms[0] - rooms[-1] == 49 * 40_960
    tier.close()


def test_nothing_is_taken_while_the_disk_is_full(tmp_path: Path) -> None:
    files = FaultyFiles()
    files.capacity = 3 * MIB
    limits = replace(LIMITS, least_free=0.05)
    tier = DiskStore.open(tmp_path, "model", limits, files)
    assert (tier.room, tier.is_idle) == (0, True)
    assert not offer(tier, Chain("chain", 1).extent())
    files.capacity = 50 * MIB
    tier.upkeep()
    assert tier.flush(PATIENCE)
    stored(tier, Chain("chain", 1).extent())
    assert tier.stats().counters.faults == {}
    tier.close()


def test_what_is_gone_has_no_place_in_the_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon writes and clears for months without an eviction."""
    monkeypatch.setattr(space, "LOOKED_AT", 2)
    tier = DiskStore.open(tmp_path, "model", LIMITS)
    for number in range(20):
        chain = Chain(str(number), 1)
        stored(tier, chain.extent())
        tier.forget(chain.names[0])
    assert tier.flush(PATIENCE)
    assert len(tier._space._by_use) <= 2 * 2
    tier.close()
