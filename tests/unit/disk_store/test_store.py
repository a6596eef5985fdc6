"""What is written to the disk store can be read: at once, and after it was closed."""

import gc
import itertools
import queue
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.disk import catalog, writer
from kvstore.disk import store as maintenance
from kvstore.disk.catalog import CatalogExtent
from kvstore.disk.extent import OsFiles
from kvstore.disk.space import Space
from kvstore.disk.store import DiskStore
from kvstore.disk.types import (
    MIB,
    Buffer,
    DiskError,
    DiskLimits,
    Entry,
    ReadFailure,
    ReadRun,
)
from kvstore.tokens import Digest
from tests.disk_store_harness import (
    LIMITS,
    PATIENCE,
    Chain,
    Extent,
    extent_files,
    flip,
    head_of,
    offer,
    offset_of,
    read,
    stored,
)


class FilesOfAClosingTier(OsFiles):
    """A write ends when the tier takes nothing more."""

    tier: DiskStore

    def __init__(self) -> None:
        self.begun = threading.Event()

    def write(self, path: Path, buffers: Sequence[Buffer]) -> None:
        self.begun.set()
        until = time.monotonic() + PATIENCE
        while self.tier.room and time.monotonic() < until:
            time.sleep(0.001)
        super().write(path, buffers)


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskStore]:
    tier = DiskStore.open(tmp_path, "model", LIMITS)
    yield tier
    tier.close()


def test_it_is_there_after_a_restart(tmp_path: Path) -> None:
    chain = Chain("one", 100)
    first = DiskStore.open(tmp_path, "model", LIMITS)
    stored(first, chain.extent())
    first.close()
    second = DiskStore.open(tmp_path, "model", LIMITS)
    assert read(second, chain.names) == (list(chain.extent().entries), None)
    assert second.stats().counters.faults == {}
    info = second.entry(chain.names[3])
    assert info is not None
    assert (info.n_tokens, info.sizes, info.n_bytes) == (16, (32_768, None, 8_192), 40_960)
    second.close()


def test_another_fingerprint_has_another_folder(tmp_path: Path) -> None:
    chain = Chain("one", 10)
    first = DiskStore.open(tmp_path, "model", LIMITS)
    stored(first, chain.extent())
    first.close()
    other = DiskStore.open(tmp_path, "another model", LIMITS)
    assert other.known(chain.names) == 0
    other.close()
    assert {use.fingerprint for use in maintenance.du(tmp_path)} == {"model", "another model"}
    again = DiskStore.open(tmp_path, "model", LIMITS)
    assert again.known(chain.names) == 10
    again.close()


def test_a_damaged_fingerprint_is_written_anew(tmp_path: Path) -> None:
    tier = DiskStore.open(tmp_path, "model", LIMITS)
    chain = Chain("one", 1)
    stored(tier, chain.extent())
    tier.close()
    next(tmp_path.rglob("fingerprint")).write_bytes(b"mod\xe5l")
    [use] = maintenance.du(tmp_path)
    assert use.fingerprint == "mod\N{REPLACEMENT CHARACTER}l"
    tier = DiskStore.open(tmp_path, "model", LIMITS)
    assert tier.known(chain.names) == 1
    tier.close()
    [use] = maintenance.du(tmp_path)
    assert use.fingerprint == "model"


def test_nobody_else_may_read_the_files(tmp_path: Path) -> None:
    directory = tmp_path / "cache"
    tier = DiskStore.open(directory, "model", LIMITS)
    stored(tier, Chain("one", 10).extent())
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in directory.rglob("*")}
    folder = maintenance.du(directory)[0].folder.name
    assert stat.S_IMODE(directory.stat().st_mode) == modes.pop(folder) == 0o700
    assert set(modes.values()) == {0o600}
    tier.close()


def test_a_second_daemon_is_refused(tmp_path: Path, tier: DiskStore) -> None:
    with pytest.raises(DiskError, match=r"in use by another daemon \(pid \d+\)"):
        DiskStore.open(tmp_path, "another model", LIMITS)
    with pytest.raises(DiskError, match="in use"):
        list(maintenance.verify(tmp_path))
    with pytest.raises(DiskError, match="in use"):
        maintenance.clear(tmp_path)


def test_an_orphan_is_refused(tier: DiskStore) -> None:
    chain = Chain("one", 10)
    assert not offer(tier, chain.extent(5))
    assert offer(tier, chain.extent(0, 5))
    assert not offer(tier, replace(chain.extent(5), root=Chain("one", 1, space="b").root))
    assert offer(tier, chain.extent(5))  # its parent is on its way
    assert tier.flush(PATIENCE)


def test_what_is_stored_is_not_written_again(tier: DiskStore) -> None:
    chain = Chain("one", 10)
    stored(tier, chain.extent(), chain.extent(), chain.extent(3))
    assert tier.stats().counters.written_entries == 10


def test_an_entry_that_is_held_is_not_reserved_again(tier: DiskStore) -> None:
    """Nor with other parts: these are entries of their own."""
    chain = Chain("one", 1)
    [entry] = chain.extent().entries
    more = replace(head_of(entry), sizes=(5, 5, 5))
    assert tier.held_entry(entry.block_hash) is None
    assert offer(tier, chain.extent())
    for _ in range(2):
        held = tier.held_entry(entry.block_hash)
        assert held is not None
        assert held.sizes == entry.sizes
        assert tier.reserve(chain.root, chain.root, more) is None
        assert tier.flush(PATIENCE)


def test_what_is_reserved_counts_as_held_and_takes_room(tier: DiskStore) -> None:
    chain = Chain("one", 3)
    room, path_room = tier.room, tier.path_room(chain.root)
    first, second = (head_of(entry) for entry in chain.extent(0, 2).entries)
    above = tier.reserve(chain.root, chain.root, first)
    below = tier.reserve(chain.root, first.block_hash, second)
    assert above is not None
    assert below is not None
    assert (tier.held(chain.names), tier.known(chain.names), tier.is_idle) == (2, 0, False)
    assert tier.room == room - 2 * first.n_bytes
    assert tier.path_room(second.block_hash) == path_room - 2 * first.n_bytes
    tier.cancel(above)
    assert not tier.write(below, chain.extent(1, 2).entries[0].parts)
    assert (tier.held(chain.names), tier.room, tier.is_idle) == (0, room, True)


def test_the_end_of_a_prompt_is_found_below_the_block_with_which_it_was_written(
    tier: DiskStore, tmp_path: Path
) -> None:
    """And the block that comes next is in one file with the block before."""
    chain = Chain("one", 3)
    end = replace(Chain("end", 1).extent().entries[0], n_tokens=3)
    assert offer(tier, chain.extent(0, 2))
    assert offer(tier, Extent(chain.root, chain.names[1], (end,)))
    stored(tier, chain.extent(2, 3))
    assert tier.lengths_below(chain.names[1]) == {3}
    assert len(extent_files(tmp_path)) == 2


def test_what_was_reserved_one_by_one_is_one_file(tier: DiskStore, tmp_path: Path) -> None:
    chain = Chain("one", 8)
    stored(tier, chain.extent())
    assert len(extent_files(tmp_path)) == 1
    assert read(tier, chain.names) == (list(chain.extent().entries), None)


def test_a_slow_clear_lets_others_go_on(tier: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """It removes few extents at a time, what hangs from others before these."""
    monkeypatch.setattr(catalog, "CLEARED_AT_ONCE", 3)
    chains = [Chain(name, 5, 200_000) for name in "abcd"]
    other = Chain("e", 5, 200_000, "other")
    for chain in (*chains, other):
        for start in range(0, 5, 2):
            stored(tier, chain.extent(start, start + 2))
    removed = list[int]()
    remove = catalog.Catalog.remove

    def remove_noted(self: catalog.Catalog, extents: Sequence[CatalogExtent]) -> int:
        removed.append(remove(self, extents))
        return removed[-1]

    monkeypatch.setattr(catalog.Catalog, "remove", remove_noted)
    tier.clear_slowly(chains[0].root)
    assert max(removed) <= 6
    assert sum(removed) == 20
    assert [tier.known(chain.names) for chain in (*chains, other)] == [0, 0, 0, 0, 5]
    tier.clear_slowly()
    assert tier.known(other.names) == 0
    assert not list(tier.problems())


def test_a_reservation_goes_with_its_namespace(tier: DiskStore) -> None:
    chain = Chain("one", 1)
    [entry] = chain.extent().entries
    reservation = tier.reserve(chain.root, chain.root, head_of(entry))
    assert reservation is not None
    tier.clear(chain.root)
    assert not tier.write(reservation, entry.parts)
    assert tier.is_idle


def test_parts_of_another_size_than_was_reserved_are_refused(tier: DiskStore) -> None:
    chain = Chain("one", 1)
    [entry] = chain.extent().entries
    reservation = tier.reserve(chain.root, chain.root, head_of(entry))
    assert reservation is not None
    with pytest.raises(ValueError, match="reserved"):
        tier.write(reservation, (b"short", None, None))


def test_the_buffer_is_bounded(tmp_path: Path) -> None:
    tier = DiskStore.open(tmp_path, "model", replace(LIMITS, buffer_bytes=300_000))
    assert tier.room == 300_000
    assert not offer(tier, Chain("large", 10).extent())
    chain = Chain("small", 7)
    stored(tier, chain.extent())
    assert read(tier, chain.names)[1] is None
    tier.close()


def test_the_day_has_a_budget_that_outlives_the_process(tmp_path: Path) -> None:
    limits, today = replace(LIMITS, daily_bytes=500_000), [1_000_000.0]
    chain = Chain("one", 10)
    tier = DiskStore.open(tmp_path, "model", limits, clock=lambda: today[0])
    stored(tier, chain.extent())
    assert tier.room == 500_000 - 409_600
    tier.close()
    tier = DiskStore.open(tmp_path, "model", limits, clock=lambda: today[0])
    assert tier.room == 500_000 - 409_600
    assert not offer(tier, Chain("two", 10).extent())
    today[0] += 86_400
    tier.upkeep()
    assert tier.flush(PATIENCE)
    stored(tier, Chain("two", 10).extent())
    tier.close()


def test_forgetting_takes_the_descendants_along(tmp_path: Path) -> None:
    chain, other = Chain("one", 10), Chain("two", 4)
    branch = Extent(chain.root, chain.names[6], other.extent().entries)
    tier = DiskStore.open(tmp_path, "model", replace(LIMITS, extent_bytes=5 * 40_960))
    stored(tier, chain.extent(), branch)
    tier.forget(chain.names[5])
    assert tier.known(chain.names) == 5
    assert tier.known(other.names) == 0
    tier.flush(PATIENCE)
    tier.close()
    tier = DiskStore.open(tmp_path, "model", LIMITS)
    assert (tier.known(chain.names), tier.known(other.names)) == (5, 0)
    tier.close()


def test_the_roots_are_those_of_what_is_stored_written_and_waiting(tmp_path: Path) -> None:
    files = FilesOfAClosingTier()
    chains = [Chain("one", 10, space=space) for space in "abc"]
    tier = files.tier = DiskStore.open(tmp_path, "model", LIMITS, files)
    assert tier.roots() == frozenset()
    assert offer(tier, chains[0].extent())
    assert files.begun.wait(PATIENCE)
    assert offer(tier, chains[1].extent())
    assert tier.roots() == {chains[0].root, chains[1].root}
    tier.close()
    tier = DiskStore.open(tmp_path, "model", LIMITS)
    assert tier.roots() == {chains[0].root}
    stored(tier, chains[2].extent())
    assert tier.roots() == {chains[0].root, chains[2].root}
    tier.clear(chains[0].root)
    assert tier.roots() == {chains[2].root}
    tier.close()


def test_clearing_all_leaves_no_bytes(tmp_path: Path, tier: DiskStore) -> None:
    stored(tier, Chain("one", 100).extent(), Chain("two", 100).extent())
    assert extent_files(tmp_path)
    tier.clear()
    assert tier.flush(PATIENCE)
    assert not extent_files(tmp_path)
    stored(tier, Chain("one", 10).extent())
    assert read(tier, Chain("one", 10).names)[1] is None


def test_what_is_not_consumed_is_not_read_further(tmp_path: Path) -> None:
    limits = replace(LIMITS, run_bytes=100_000, read_ahead_bytes=150_000)
    chain, runs = Chain("one", 40), queue.SimpleQueue[ReadRun | ReadFailure]()
    tier = DiskStore.open(tmp_path, "model", limits)
    stored(tier, chain.extent())
    ticket = tier.read(chain.names, runs.put)
    held = [runs.get(timeout=PATIENCE), runs.get(timeout=PATIENCE)]
    assert read(tier, chain.names)[1] is None  # it would have been read between the others' runs
    assert runs.empty()
    n_read = 0
    while n_read < 40:
        run = held.pop(0) if held else runs.get(timeout=PATIENCE)
        assert isinstance(run, ReadRun)
        assert run.start == n_read
        assert run.n_bytes <= 100_000
        n_read += len(run.entries)
        ticket.consumed(run.n_bytes)
    tier.close()


def test_a_ticket_is_read_as_far_ahead_as_it_is_told(tmp_path: Path) -> None:
    limits = replace(LIMITS, run_bytes=1, read_ahead_bytes=1)
    chain, runs = Chain("one", 40), queue.SimpleQueue[ReadRun | ReadFailure]()
    tier = DiskStore.open(tmp_path, "model", limits)
    stored(tier, chain.extent())
    ticket = tier.read(chain.names, runs.put)
    first = runs.get(timeout=PATIENCE)
    assert isinstance(first, ReadRun)
    ticket.keep_ahead(0)
    ticket.consumed(first.n_bytes)
    assert read(tier, chain.names)[1] is None  # it would have been read between the others' runs
    assert runs.empty()
    ticket.keep_ahead(MIB * 100)
    assert [runs.get(timeout=PATIENCE) for _ in range(39)]
    tier.close()


def test_what_is_delivered_has_been_copied_by_the_reader(tier: DiskStore) -> None:
    """Whoever takes it has no copy to make while the ticket is locked."""
    chain = Chain("one", 4)
    stored(tier, chain.extent())
    entries, _ = read(tier, chain.names)
    parts = [part for entry in entries for part in entry.parts if part is not None]
    assert len(parts) >= 4
    assert all(isinstance(part, bytes) for part in parts)


def test_nothing_is_delivered_after_a_cancel(tmp_path: Path) -> None:
    chain, runs = Chain("one", 40), list[ReadRun | ReadFailure]()
    tier = DiskStore.open(tmp_path, "model", replace(LIMITS, run_bytes=1, read_ahead_bytes=1))
    stored(tier, chain.extent())
    arrived = threading.Event()

    def deliver(run: ReadRun | ReadFailure) -> None:
        runs.append(run)
        arrived.set()

    ticket = tier.read(chain.names, deliver)
    assert arrived.wait(PATIENCE)
    ticket.cancel()
    ticket.consumed(MIB)
    assert read(tier, chain.names)[1] is None
    assert len(runs) == 1
    tier.close()


def test_a_reader_outlives_who_it_delivers_to(
    tier: DiskStore, caplog: pytest.LogCaptureFixture
) -> None:
    chain, called = Chain("one", 4), threading.Semaphore(0)
    stored(tier, chain.extent())

    def deliver(_: ReadRun | ReadFailure) -> None:
        called.release()
        raise ValueError("not wanted")

    for _ in range(4):
        tier.read(chain.names, deliver)
        assert called.acquire(timeout=PATIENCE)
    assert read(tier, chain.names)[1] is None
    assert "not wanted" in caplog.text


def test_a_rate_is_observed(tier: DiskStore) -> None:
    assert tier.read_rate is None
    stored(tier, Chain("one", 4).extent())
    read(tier, Chain("one", 4).names)
    assert tier.read_rate


def test_verify_finds_a_flipped_bit_and_du_counts(tmp_path: Path) -> None:
    tier = DiskStore.open(tmp_path, "model", LIMITS)
    chain = Chain("one", 30)
    stored(tier, chain.extent())
    tier.close()
    (sound,) = maintenance.verify(tmp_path)
    assert sound.is_sound
    assert (sound.entries, sound.n_bytes, sound.fingerprint) == (30, 30 * 40_960, "model")
    (use,) = maintenance.du(tmp_path)
    assert use.n_extents == 2
    assert 30 * 40_960 < use.allocated_bytes < 31 * 40_960 + MIB
    first = extent_files(tmp_path)[-1]
    flip(first, offset_of(first, 5) + 7)
    (found,) = maintenance.verify(tmp_path)
    assert not found.is_sound
    assert found.damaged == (chain.names[5].hex(),)
    assert maintenance.clear(tmp_path) == use.allocated_bytes
    assert maintenance.du(tmp_path) == []


def test_there_is_nothing_to_verify_where_there_is_no_cache(tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(DiskError, match="there is no disk cache"):
            maintenance.du(directory)
    assert not list(tmp_path.iterdir())


def test_a_limit_that_cannot_hold_anything_is_refused() -> None:
    with pytest.raises(DiskError, match="at least 16 MiB"):
        DiskLimits(max_bytes=MIB)


def test_what_is_being_written_when_a_tier_is_closed_is_kept(tmp_path: Path) -> None:
    """It is waited for in any case."""
    files, (first, second) = FilesOfAClosingTier(), (Chain(name, 10) for name in ("one", "two"))
    tier = files.tier = DiskStore.open(tmp_path, "model", LIMITS, files)
    assert offer(tier, first.extent())
    assert files.begun.wait(PATIENCE)
    assert offer(tier, second.extent())
    tier.close()
    tier = DiskStore.open(tmp_path, "model", LIMITS)
    assert [tier.known(chain.names) for chain in (first, second)] == [10, 0]
    assert len(read(tier, first.names)[0]) == 10
    tier.close()


def test_cycles_are_looked_for_once_when_a_tier_has_been_opened(tmp_path: Path) -> None:
    """Again and again is a third of the time that a hundred thousand records take."""
    tier = DiskStore.open(tmp_path, "model", LIMITS)
    for start in range(4):
        stored(tier, Chain(f"chain {start}", 500, n_bytes=64).extent())
    tier.close()
    collections = list[str]()
    gc.callbacks.append(lambda phase, info: collections.append(phase))
    try:
        tier = DiskStore.open(tmp_path, "model", LIMITS)
        assert collections.count("start") <= 1
        assert gc.isenabled()
    finally:
        gc.callbacks.pop()
    tier.close()


def test_names_are_digests_of_any_kind(tier: DiskStore) -> None:
    """A tail's is not of a whole block, and its entry has as many tokens as it has."""
    chain = Chain("one", 2)
    tail = Entry(Digest(b"t" * 32), 5, (b"block", None, None))
    stored(tier, chain.extent(), Extent(chain.root, chain.names[1], (tail,)))
    assert read(tier, [*chain.names, tail.block_hash])[0][-1] == tail


def test_upkeep_waits_for_no_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon that writes all day notes what is used, too. A second passes with each look."""
    monkeypatch.setattr(writer, "monotonic", itertools.count().__next__)
    tier = DiskStore.open(tmp_path, "model", LIMITS)
    kept_up = queue.Queue[None]()
    monkeypatch.setattr(Space, "look_again", lambda _: kept_up.put(None))
    for number in range(20):
        stored(tier, Chain(str(number), 1).extent())
    assert kept_up.qsize() >= 1
    tier.close()
