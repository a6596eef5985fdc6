"""What is written of the tree, when, in which order, and what happens when it cannot be."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from engine.values.settings import DiskWrites
from kvstore.disk.types import DiskCounters, DiskStats, EntryHead, Fault
from kvstore.ops import ReadBlock
from kvstore.recurrent import RecurrentGroup
from kvstore.tokens import Digest
from kvstore.types import BlockId
from tests.unit.disk_cache.desk import (
    BLOCK_BYTES,
    IDLE,
    STATE_BYTES,
    WRITE_RULES,
    Desk,
    Shelf,
    contents,
)
from tests.unit.kv_helpers import (
    BLOCK,
    NS,
    admit,
    compute,
    drain,
    generate,
    packed,
    run_of,
    serve,
    tree_of,
)

PROMPT = run_of(0, 6 * BLOCK)
SALTED = replace(NS, cache_salt="pepper")
ALL, EXIT = (replace(WRITE_RULES, writes=DiskWrites(mode)) for mode in ("all", "exit"))


class Asked(Shelf):
    """Counts how often somebody asks for an entry, or whether a name is held."""

    n_asked = 0

    def entry(self, name: Digest) -> EntryHead | None:
        self.n_asked += 1
        return super().entry(name)

    def held_entry(self, name: Digest) -> EntryHead | None:
        self.n_asked += 1
        return super().held_entry(name)

    def held(self, names: Sequence[Digest]) -> int:
        self.n_asked += len(names)
        return super().held(names)


def blocks(reads: Sequence[ReadBlock]) -> list[BlockId]:
    return [read.block for read in reads]


def path_of(desk: Desk, tokens: Sequence[int]) -> list[BlockId]:
    """The blocks in memory, in order."""
    return admit(desk.store, [*tokens, 0]).table[: len(tokens) // BLOCK]


def test_what_has_been_idle_for_a_second_is_written() -> None:
    desk = Desk()
    serve(desk.store, PROMPT)
    assert desk.disk.wait_seconds() == IDLE
    desk.wait(IDLE - 0.01)
    assert not desk.disk.is_busy
    assert not desk.step()[1]
    desk.wait(0.01)
    assert desk.disk.is_busy
    assert len(desk.step()[1]) == 6
    assert desk.has(PROMPT) == len(PROMPT)
    assert desk.disk.wait_seconds() is None


def test_what_grows_is_postponed() -> None:
    desk = Desk()
    for n_blocks in range(1, 7):
        serve(desk.store, PROMPT[: n_blocks * BLOCK])
        desk.wait(IDLE / 2)
        assert not desk.step()[1]
    desk.wait(IDLE / 2)
    assert len(desk.step()[1]) == 6


def test_what_somebody_adopts_is_written_at_once() -> None:
    desk = Desk()
    serve(desk.store, PROMPT)
    assert not desk.step()[1]
    lease = admit(desk.store, [*PROMPT, 0])
    assert blocks(desk.step()[1]) == lease.table[:6]


def test_what_memory_serves_is_used_on_disk_too() -> None:
    desk = Desk()
    serve(desk.store, PROMPT)
    desk.wait()
    desk.write()
    admit(desk.store, [*PROMPT, 0])
    desk.step()
    assert desk.shelf.touched == list(desk.disk.block_hashes(NS, packed([*PROMPT, 0])))


def test_what_was_adopted_and_evicted_since_the_last_step_is_nowhere_used() -> None:
    desk = Desk()
    serve(desk.store, PROMPT)
    desk.step()
    desk.store.release(admit(desk.store, [*PROMPT, 0]))
    desk.store.begin_step()
    while tree_of(desk.store).evict() is not None:
        pass
    assert tree_of(desk.store).n_nodes == 0
    assert not desk.step()[1]
    assert not desk.shelf.touched


def test_what_is_about_to_be_evicted_is_written_at_once() -> None:
    desk = Desk(n_blocks=32)
    serve(desk.store, PROMPT)
    assert not desk.step()[1]
    lease = admit(desk.store, run_of(1000, 25 * BLOCK))  # one block is left
    compute(desk.store, lease)
    assert len(desk.step()[1]) == 6
    assert desk.has(PROMPT) == len(PROMPT)


@pytest.mark.parametrize(("n_tokens", "n_read"), [(2 * BLOCK, 2), (2 * BLOCK - 1, 0)])
def test_short_paths_are_not_written(n_tokens: int, n_read: int) -> None:
    desk = Desk()
    serve(desk.store, PROMPT[:n_tokens])
    desk.wait()
    assert len(desk.step()[1]) == n_read
    assert not desk.disk.is_busy


def test_all_writes_short_paths_and_waits_for_nothing() -> None:
    desk = Desk(write_rules=ALL)
    serve(desk.store, PROMPT[:BLOCK])
    assert len(desk.step()[1]) == 1


def test_exit_writes_nothing_before_the_end() -> None:
    desk = Desk(write_rules=EXIT, n_blocks=32)
    serve(desk.store, PROMPT)
    desk.wait(1000.0)
    desk.store.release(admit(desk.store, [*PROMPT, 0]))
    admit(desk.store, run_of(1000, 26 * BLOCK))  # none is left
    assert not desk.step()[1]
    assert desk.disk.wait_seconds() is None
    desk.disk.end()
    assert desk.disk.is_ending
    assert len(desk.step()[1]) == 6
    assert not desk.disk.is_ending


def test_what_was_evicted_is_not_remembered_until_the_end() -> None:
    """The first prompt is held, so that the entries after it are never the first of the queue."""
    desk = Desk(write_rules=EXIT, n_blocks=32)
    serve(desk.store, PROMPT)
    admit(desk.store, [*PROMPT, 0])
    for number in range(1, 100):
        serve(desk.store, run_of(1000 * number, 6 * BLOCK))
        desk.step()
    assert len(desk.disk._writer._queue) <= 2 * tree_of(desk.store).n_nodes
    desk.disk.end()
    desk.write()
    assert desk.has(run_of(99_000, 6 * BLOCK)) == 6 * BLOCK


def test_the_end_takes_what_was_used_last_first() -> None:
    desk = Desk(write_rules=EXIT, step_bytes=6 * BLOCK_BYTES)
    starts = [0, 100, 200]
    for start in starts:
        serve(desk.store, run_of(start, 6 * BLOCK))
    desk.disk.end()
    for start in reversed(starts):
        desk.step()
        assert [desk.has(run_of(s, 6 * BLOCK)) > 0 for s in starts] == [s >= start for s in starts]


def test_the_end_is_over_when_its_time_is() -> None:
    desk = Desk(write_rules=EXIT, step_bytes=BLOCK_BYTES, shutdown_seconds=5.0)
    serve(desk.store, PROMPT)
    desk.disk.end()
    desk.step()
    assert desk.disk.is_ending
    desk.wait(5.0)
    assert not desk.disk.is_ending


def test_the_end_waits_for_no_disk_that_takes_nothing() -> None:
    """Its day's budget is spent, or it has failed: seconds would change nothing."""
    desk = Desk(write_rules=EXIT)
    serve(desk.store, PROMPT)
    desk.shelf.room = 0
    desk.disk.end()
    desk.shelf.is_idle = False  # what it has taken is still being written: there will be room
    desk.step()
    assert desk.disk.is_ending
    desk.wait()
    desk.shelf.is_idle = True
    desk.step()
    assert not desk.disk.is_ending


def test_the_end_writes_no_more_than_the_disk_holds() -> None:
    """What was used last is written first, so more would push that out."""
    desk = Desk(write_rules=EXIT)
    desk.shelf.longest_path = 8 * BLOCK_BYTES
    for start in (0, 100, 200):
        serve(desk.store, run_of(start, 6 * BLOCK))
    desk.disk.end()
    while desk.disk.is_ending:
        desk.step()
    assert [desk.has(run_of(start, 6 * BLOCK)) // BLOCK for start in (0, 100, 200)] == [0, 2, 6]


def test_a_path_that_is_longer_than_the_disk_keeps_is_written_up_to_there_once() -> None:
    desk = Desk()
    desk.shelf.longest_path = 4 * BLOCK_BYTES
    serve(desk.store, PROMPT)
    for _ in range(3):
        desk.wait()
        desk.write()
        serve(desk.store, [*PROMPT, *run_of(500, BLOCK)])
    assert desk.has(PROMPT) == 4 * BLOCK
    assert desk.shelf.n_written == 4 * BLOCK_BYTES
    assert not desk.disk.is_busy


def test_salted_prompts_are_written_only_if_a_rule_says_so() -> None:
    for salted in (False, True):
        desk = Desk(write_rules=replace(WRITE_RULES, salted=salted))
        serve(desk.store, PROMPT, namespace=SALTED)
        desk.wait()
        desk.write()
        assert desk.has(PROMPT, SALTED) == (len(PROMPT) if salted else 0)


def test_a_step_reads_a_bounded_number_of_bytes_parents_first() -> None:
    desk = Desk(step_bytes=2 * BLOCK_BYTES)
    serve(desk.store, PROMPT)
    path = path_of(desk, PROMPT)
    desk.wait()
    steps = [blocks(desk.step()[1]) for _ in range(4)]
    assert steps == [path[:2], path[2:4], path[4:], []]


def test_parents_are_written_with_a_child_that_is_due_alone() -> None:
    desk = Desk(n_blocks=32)
    stem, branch = PROMPT[: 3 * BLOCK], run_of(500, 2 * BLOCK)
    serve(desk.store, PROMPT)
    serve(desk.store, [*stem, *branch])
    lease = admit(desk.store, run_of(1000, 23 * BLOCK))  # the leaves are about to be evicted
    compute(desk.store, lease)
    desk.step()
    assert desk.has(PROMPT) == len(PROMPT)
    places = {it.extent.root for it in desk.shelf.written}
    for extent, head in desk.shelf.written:
        assert extent.parent in places
        places.add(head.block_hash)


def test_what_is_shared_is_written_once() -> None:
    desk = Desk()
    serve(desk.store, PROMPT)
    desk.wait()
    desk.write()
    serve(desk.store, [*PROMPT[: 3 * BLOCK], *run_of(500, 2 * BLOCK)])
    desk.wait()
    assert len(desk.write()) == 2
    assert desk.shelf.n_written == 8 * BLOCK_BYTES


def test_the_next_step_goes_on_behind_what_one_in_flight_reads() -> None:
    desk = Desk(step_bytes=3 * BLOCK_BYTES)
    serve(desk.store, PROMPT)
    path = path_of(desk, PROMPT)
    desk.wait()
    first, _, reads = desk.plan()
    second, _, more = desk.plan()
    assert blocks(reads) + blocks(more) == path
    for number, found in ((first, reads), (second, more)):
        desk.disk.commit(number, [(bytes(BLOCK_BYTES), None) for _ in found])
    assert desk.has(PROMPT) == len(PROMPT)


def test_where_the_disk_has_no_room_all_stays_dirty() -> None:
    desk = Desk()
    serve(desk.store, PROMPT)
    desk.wait()
    desk.shelf.room = 0
    assert not desk.step()[1]
    wait = desk.disk.wait_seconds()
    assert wait is not None
    assert 0 < wait < IDLE
    assert not desk.disk.is_busy  # it does not spin meanwhile
    desk.shelf.room = 2 * BLOCK_BYTES
    desk.wait(wait)
    assert len(desk.step()[1]) == 2
    desk.shelf.room = 1000
    desk.wait(wait)
    assert len(desk.write()) == 4


def test_what_falls_due_while_the_disk_has_no_room_does_not_spin() -> None:
    desk = Desk()
    serve(desk.store, PROMPT)
    desk.wait()
    desk.shelf.room = 0
    serve(desk.store, run_of(1000, 6 * BLOCK))
    desk.wait(IDLE - 0.1)
    assert not desk.step()[1]
    desk.wait(0.2)
    wait = desk.disk.wait_seconds()
    assert wait is not None
    assert wait > 0
    assert not desk.disk.is_busy
    desk.wait(wait)
    assert desk.disk.is_busy


def test_to_ask_how_it_is_changes_nothing() -> None:
    desk = Desk()
    serve(desk.store, PROMPT)
    desk.wait()
    for _ in range(2):
        assert desk.disk.is_busy
        assert not desk.disk.is_loading
        assert not desk.disk.is_ending
        assert desk.disk.wait_seconds() == 0.0
        assert desk.disk.namespaces == frozenset()
    assert len(desk.step()[1]) == 6


def test_an_entry_larger_than_a_step_may_read_is_read_alone() -> None:
    desk = Desk(step_bytes=BLOCK_BYTES - 1)
    serve(desk.store, PROMPT)
    desk.wait()
    for _ in PROMPT[::BLOCK]:
        assert len(desk.step()[1]) == 1
        desk.wait()
    assert desk.has(PROMPT) == len(PROMPT)


def test_a_failed_step_has_read_nothing() -> None:
    desk = Desk()
    serve(desk.store, PROMPT)
    desk.wait()
    number, _, reads = desk.plan()
    assert len(reads) == 6
    desk.disk.fail(number)
    assert not desk.has(PROMPT)
    desk.wait()
    assert len(desk.write()) == 6
    assert desk.has(PROMPT) == len(PROMPT)


@pytest.mark.parametrize("refuses", [True, False])
def test_what_was_not_read_again_since_it_was_being_read_is_read_when_that_was_for_nothing(
    refuses: bool,
) -> None:
    """The prompt has left memory, and come back in other blocks."""
    desk = Desk()
    serve(desk.store, PROMPT)
    desk.wait()
    first, _, reads = desk.plan()
    drain(desk.store)
    admit(desk.store, run_of(1000, 6 * BLOCK))
    serve(desk.store, PROMPT)
    desk.wait()
    second, _, again = desk.plan()
    assert (len(reads), len(again)) == (6, 0)
    if refuses:
        desk.shelf.clear()
        desk.disk.commit(first, [contents(read) for read in reads])
    else:
        desk.disk.fail(first)
    desk.disk.commit(second, [])
    desk.wait()
    assert len(desk.write()) == 6
    assert desk.has(PROMPT) == len(PROMPT)


def test_what_the_disk_loses_is_written_again_with_what_comes_behind_it() -> None:
    desk = Desk()
    serve(desk.store, PROMPT)
    desk.wait()
    desk.write()
    desk.shelf.forget(desk.disk.block_hashes(NS, packed(PROMPT))[2])
    longer = [*PROMPT, *run_of(500, BLOCK)]
    serve(desk.store, longer)
    desk.wait()
    assert len(desk.write()) == 5
    assert desk.has(longer) == len(longer)


@pytest.mark.parametrize("tiers", ["memory", "disk", "both"])
def test_a_clear_between_plan_and_commit_drops_what_was_read(tiers: str) -> None:
    """With what is dirty: nothing is written again before somebody goes on with it."""
    desk = Desk()
    serve(desk.store, PROMPT)
    desk.wait()
    number, _, reads = desk.plan()
    dirty = run_of(500, 3 * BLOCK)
    serve(desk.store, dirty)
    if tiers != "memory":
        desk.disk.clear(None)
    if tiers != "disk":
        desk.disk.forget(None)
        desk.store.clear()
    desk.disk.commit(number, [(bytes(BLOCK_BYTES), None) for _ in reads])
    desk.wait()
    assert not desk.step()[1]
    assert not desk.shelf.records
    assert not desk.disk.is_busy
    for prompt in (PROMPT, dirty):
        longer = [*prompt, *run_of(800, BLOCK)]
        serve(desk.store, longer)
        desk.wait()
        desk.write()
        assert desk.has(longer) == len(longer)


def test_a_clear_of_one_namespace_leaves_the_others_reads() -> None:
    desk = Desk(write_rules=replace(WRITE_RULES, salted=True))
    for namespace in (NS, SALTED):
        serve(desk.store, PROMPT, namespace=namespace)
    desk.wait()
    number, _, reads = desk.plan()
    assert len(reads) == 12
    dirty = run_of(500, 3 * BLOCK)
    for namespace in (NS, SALTED):
        serve(desk.store, dirty, namespace=namespace)
    desk.disk.clear(NS)
    desk.disk.commit(number, [(bytes(BLOCK_BYTES), None) for _ in reads])
    desk.wait()
    desk.write()
    for prompt in (PROMPT, dirty):
        assert (desk.has(prompt), desk.has(prompt, SALTED)) == (0, len(prompt))


def test_a_namespace_that_was_evicted_while_it_is_read_is_known_until_then() -> None:
    """Else a clear would not find it, and it would be written behind the clear."""
    desk = Desk(write_rules=replace(WRITE_RULES, salted=True))
    serve(desk.store, PROMPT, namespace=SALTED)
    desk.wait()
    number, _, reads = desk.plan()
    while tree_of(desk.store).evict() is not None:
        pass
    assert tree_of(desk.store).roots == {}
    assert desk.disk.namespaces == {SALTED}
    desk.disk.clear(SALTED)
    assert desk.disk.namespaces == frozenset()
    desk.disk.commit(number, [contents(read) for read in reads])
    assert not desk.shelf.records


def test_blocks_that_have_left_the_tree_are_not_read() -> None:
    desk = Desk()
    serve(desk.store, PROMPT)
    desk.wait()
    for _ in range(3):
        tree_of(desk.store).evict()
    assert len(desk.step()[1]) == 3
    while tree_of(desk.store).evict() is not None:
        pass
    assert not desk.step()[1]
    assert desk.disk.wait_seconds() is None


def test_states_are_written_where_they_stand_in_blocks_and_tails() -> None:
    """At a prompt's end, in the middle of a block, and again when there are more of them."""
    group = RecurrentGroup(4, 8, BLOCK, 10_000)
    desk = Desk(groups=[group])
    prompt = PROMPT[: 5 * BLOCK + 2]
    serve(desk.store, prompt)
    desk.wait()
    reads = desk.write()
    assert [read.n_tokens for read in reads] == [BLOCK] * 5 + [2]
    assert [read.state is not None for read in reads] == [False] * 5 + [True]
    longer = [*prompt, *run_of(500, 2 * BLOCK)]
    serve(desk.store, longer)
    desk.wait()
    desk.write()
    again = Desk(desk.shelf, groups=[RecurrentGroup(4, 8, BLOCK, 10_000)])
    assert again.load([*prompt, 0, 1, 2])
    desk.shelf.hand_over(6)
    again.step()
    assert again.cached([*prompt, 0, 1]) == len(prompt)
    assert desk.shelf.n_written == 9 * BLOCK_BYTES + 2 * STATE_BYTES


def test_a_state_that_comes_later_to_a_block_is_written_then() -> None:
    """The conversation paused at a block's end, was written, and ended there."""
    desk = Desk(groups=[RecurrentGroup(4, 8, BLOCK, 10_000)])
    lease = admit(desk.store, PROMPT[: 5 * BLOCK])
    generate(desk.store, lease, PROMPT[5 * BLOCK :])
    compute(desk.store, lease)
    desk.wait()
    last = [read for read in desk.write() if read.block == lease.table[5]]
    assert [read.state for read in last] == [None]
    desk.store.donate(lease)
    serve(desk.store, [*PROMPT, *run_of(500, BLOCK)])
    desk.wait()
    last = [read for read in desk.write() if read.block == lease.table[5]]
    assert [read.state is not None for read in last] == [True]
    assert desk.shelf.n_written == 8 * BLOCK_BYTES + 3 * STATE_BYTES
    again = Desk(desk.shelf, groups=[RecurrentGroup(4, 8, BLOCK, 10_000)])
    assert again.load([*PROMPT, 0])
    desk.shelf.hand_over(6)
    again.step()
    assert again.cached(PROMPT) == len(PROMPT)


def test_a_long_path_is_not_looked_through_again() -> None:
    """Each look at a block asks the tier for its entry."""
    shelf = Asked()
    desk = Desk(shelf, groups=[RecurrentGroup(4, 8, BLOCK, 10_000)], n_blocks=300)
    prompt = run_of(0, 200 * BLOCK)
    lease = admit(desk.store, prompt)
    compute(desk.store, lease)
    desk.wait()
    assert len(desk.write()) == 200
    for token_id in range(2 * BLOCK):
        shelf.n_asked = 0
        lease.tokens.append(token_id)
        compute(desk.store, lease)
        desk.wait()
        desk.write()
        assert shelf.n_asked < 20
    assert desk.has(lease.tokens.ids(0, len(lease.tokens))) == 202 * BLOCK


def test_nothing_is_postponed_because_what_comes_after_it_was_split() -> None:
    """Whoever is due first stands first, or it would wait for those before it."""
    desk = Desk()
    serve(desk.store, PROMPT)
    desk.wait(IDLE / 2)
    serve(desk.store, run_of(500, 6 * BLOCK))
    desk.wait(IDLE / 4)
    serve(desk.store, [*PROMPT[: 3 * BLOCK], *run_of(800, BLOCK)])
    desk.wait(IDLE / 4)
    desk.write()
    assert desk.has(PROMPT) == len(PROMPT)
    assert not desk.has(run_of(500, 6 * BLOCK))


def test_a_tail_that_memory_serves_is_used_on_disk_too() -> None:
    desk = Desk()
    prompt = PROMPT[: 5 * BLOCK + 2]
    serve(desk.store, prompt)
    desk.wait()
    desk.write()
    admit(desk.store, [*prompt, 0])
    desk.step()
    whole = desk.disk.block_hashes(NS, packed(prompt))[-1]
    [tail] = (name for name, stored in desk.shelf.records.items() if stored.parent == whole)
    assert desk.shelf.touched[-2:] == [whole, tail]


def test_a_step_reads_what_it_has_time_for_by_what_the_ones_before_took() -> None:
    desk = Desk(step_bytes=2 * BLOCK_BYTES)
    serve(desk.store, PROMPT)
    desk.wait()
    number, _, reads = desk.plan()
    assert len(reads) == 2
    desk.disk.observe([], number, BLOCK_BYTES)  # half of what was thought
    desk.disk.commit(number, [(bytes(BLOCK_BYTES), None) for _ in reads])
    assert len(desk.step()[1]) == 4


class FullDisk(Shelf):
    """It has evicted and refused entries, and writes no more today."""

    def stats(self) -> DiskStats:
        counters = DiskCounters(evicted_entries=3, refused_entries=4)
        return replace(
            super().stats(), counters=counters, write_fault=Fault.NO_SPACE, is_day_spent=True
        )


def test_what_the_disk_has_lost_is_in_the_figures() -> None:
    stats = Desk(FullDisk()).disk.stats()
    assert (stats.evicted_entries, stats.refused_entries) == (3, 4)
    assert (stats.write_fault, stats.is_day_spent) == ("no_space", True)
