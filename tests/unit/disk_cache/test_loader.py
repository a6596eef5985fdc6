"""What is loaded, when, how much at once, and what is left when it goes wrong."""

from dataclasses import replace

import pytest

from engine.disk_cache.loader import LoadAttempt, LoadOutcome
from kvstore.in_flight import QueuedPrompt
from kvstore.recurrent import RecurrentGroup
from kvstore.tokens import Tokens
from kvstore.types import Namespace
from kvstore.window import WindowGroup
from tests.unit.disk_cache.desk import (
    BLOCK_BYTES,
    LOAD_RULES,
    WRITE_RULES,
    Desk,
    Shelf,
    filled,
)
from tests.unit.kv_helpers import BLOCK, NS, admit, packed, run_of, serve, tree_of, waits

PROMPT = run_of(0, 10 * BLOCK)
WINDOW = BLOCK + 2
SALTED = replace(NS, cache_salt="pepper")


@pytest.fixture
def shelf() -> Shelf:
    """With ten blocks of an earlier life."""
    desk = Desk()
    serve(desk.store, PROMPT)
    desk.wait()
    assert len(desk.write()) == 10
    return desk.shelf


@pytest.fixture
def desk(shelf: Shelf) -> Desk:
    return Desk(shelf)


def stored(shelf: Shelf, desk: Desk) -> list[bytes]:
    """The blocks' bytes of the prompt, as they were written."""
    parts = [
        shelf.records[name].entry.parts[0]
        for name in desk.disk.block_hashes(NS, packed([*PROMPT, 0]))
    ]
    return [bytes(part) for part in parts if part is not None]


def pending() -> QueuedPrompt:
    return QueuedPrompt(NS, Tokens([*PROMPT, 0]))


def test_what_was_written_comes_back_block_for_block(desk: Desk, shelf: Shelf) -> None:
    assert desk.load([*PROMPT, 0])
    assert desk.disk.is_loading
    shelf.hand_over(10)
    fills, _ = desk.step()
    assert filled(fills) == stored(shelf, desk)
    assert not desk.disk.is_loading
    assert desk.cached(PROMPT) == len(PROMPT)
    stats = desk.disk.stats()
    assert (stats.hits, stats.loaded_tokens) == (1, len(PROMPT))
    assert desk.store.pool.n_referenced == 0


def test_what_is_filled_in_is_published_with_its_step_and_not_before(
    desk: Desk, shelf: Shelf
) -> None:
    desk.load([*PROMPT, 0])
    shelf.hand_over(4)
    number, fills, _ = desk.plan()
    assert len(fills) == 4
    assert desk.cached(PROMPT) == 0
    desk.disk.commit(number, ())
    assert desk.cached(PROMPT) == 4 * BLOCK
    assert desk.disk.is_loading


def test_a_step_fills_in_a_bounded_number_of_bytes(shelf: Shelf) -> None:
    desk = Desk(shelf, step_bytes=3 * BLOCK_BYTES)
    desk.load([*PROMPT, 0])
    shelf.hand_over(10)
    assert [len(desk.step()[0]) for _ in range(5)] == [3, 3, 3, 1, 0]
    assert shelf.tickets[0].ahead_bytes == 0  # all has been consumed
    assert desk.cached(PROMPT) == len(PROMPT)


def test_an_entry_larger_than_that_is_filled_in_alone(shelf: Shelf) -> None:
    desk = Desk(shelf, step_bytes=1)
    desk.load([*PROMPT, 0])
    shelf.hand_over(10)
    assert [len(desk.step()[0]) for _ in range(11)] == [1] * 10 + [0]


@pytest.mark.parametrize(
    ("n_tokens", "is_worth"), [(len(PROMPT) + 1, True), (2 * BLOCK + 1, True), (2 * BLOCK, False)]
)
def test_few_tokens_are_not_worth_a_load(desk: Desk, n_tokens: int, is_worth: bool) -> None:
    assert desk.load([*PROMPT, 0][:n_tokens]) == is_worth


def test_reading_must_be_predicted_to_be_faster_than_computing(shelf: Shelf) -> None:
    rate = 1000.0
    desk = Desk(shelf, load_rules=replace(LOAD_RULES, worth=0.5, first_rate=rate))
    seconds = 10 * BLOCK_BYTES / rate
    assert not desk.load([*PROMPT, 0], compute_seconds=2 * seconds)
    assert desk.load([*PROMPT, 0], compute_seconds=2 * seconds + 0.001)


def test_the_observed_rate_counts_once_there_is_one(shelf: Shelf) -> None:
    desk = Desk(shelf, load_rules=replace(LOAD_RULES, worth=0.5, first_rate=1e9))
    shelf.read_rate = 1000.0
    assert not desk.load([*PROMPT, 0], compute_seconds=0.1)


@pytest.mark.parametrize("salted", [False, True])
def test_salted_prompts_are_looked_up_only_if_a_rule_says_so(salted: bool) -> None:
    writer = Desk(write_rules=replace(WRITE_RULES, salted=True))
    serve(writer.store, PROMPT, namespace=SALTED)
    writer.wait()
    writer.write()
    desk = Desk(writer.shelf, load_rules=replace(LOAD_RULES, salted=salted))
    assert desk.load([*PROMPT, 0], SALTED) == salted


def test_only_what_memory_lacks_is_read(desk: Desk, shelf: Shelf) -> None:
    serve(desk.store, PROMPT[: 3 * BLOCK])
    desk.load([*PROMPT, 0])
    assert shelf.tickets[0].names == desk.disk.block_hashes(NS, packed([*PROMPT, 0]))[3:]
    shelf.hand_over(10)
    assert filled(desk.step()[0]) == stored(shelf, desk)[3:]
    assert desk.cached(PROMPT) == len(PROMPT)
    assert desk.disk.stats().loaded_tokens == 7 * BLOCK


def test_where_there_is_no_room_nothing_is_loaded(desk: Desk, shelf: Shelf) -> None:
    assert not desk.load([*PROMPT, 0], spare_blocks=64 - 9)
    assert not shelf.tickets
    assert desk.load([*PROMPT, 0], spare_blocks=64 - 10)


def test_a_duplicate_waits_for_the_load_and_finds_it(desk: Desk, shelf: Shelf) -> None:
    desk.load([*PROMPT, 0])
    duplicate = pending()
    assert waits(desk.store, duplicate)
    shelf.hand_over(9)
    desk.step()
    assert waits(desk.store, duplicate)
    shelf.hand_over(1)
    desk.step()
    assert not waits(desk.store, duplicate)
    assert admit(desk.store, [*PROMPT, 0]).cached_tokens == len(PROMPT)


def test_a_failure_leaves_what_came_before_it(desk: Desk, shelf: Shelf) -> None:
    desk.load([*PROMPT, 0])
    waiting = pending()
    shelf.hand_over(4)
    shelf.break_off()
    assert len(desk.step()[0]) == 4
    assert not desk.disk.is_loading
    assert not waits(desk.store, waiting)
    assert desk.cached(PROMPT) == 4 * BLOCK


def test_whole_and_cut_loads_count_alike_and_those_that_brought_nothing_do_not(
    desk: Desk, shelf: Shelf
) -> None:
    for n_entries, hits, loaded_tokens, seconds in ((0, 0, 0, 0.0), (4, 1, 16, 0.5)):
        desk.load([*PROMPT, 0])
        shelf.hand_over(n_entries)
        desk.wait(0.5)
        shelf.break_off()
        desk.step()
        stats = desk.disk.stats()
        found = (stats.hits, stats.loaded_tokens, stats.load_seconds)
        assert found == (hits, loaded_tokens, seconds)
    desk.load([*PROMPT, 0])
    shelf.hand_over(len(PROMPT) // BLOCK - 4)
    desk.step()
    stats = desk.disk.stats()
    assert (stats.hits, stats.loaded_tokens, stats.given_up_loads) == (2, len(PROMPT), 0)


def test_parts_of_a_wrong_size_end_the_load_at_once(desk: Desk, shelf: Shelf) -> None:
    """What would have come behind them is not waited for, and the prompt is computed."""
    hashes = desk.disk.block_hashes(NS, packed([*PROMPT, 0]))
    shelf.change(hashes[4], (bytes(BLOCK_BYTES - 1), None))
    desk.load([*PROMPT, 0])
    waiting = pending()
    shelf.hand_over(6)
    assert len(desk.step()[0]) == 4
    assert not desk.disk.is_loading
    assert not waits(desk.store, waiting)
    assert shelf.tickets[0].is_over
    assert desk.cached(PROMPT) == shelf.known(hashes) * BLOCK == 4 * BLOCK
    assert desk.store.pool.n_referenced == 0


def test_wrong_parts_are_forgotten_once(desk: Desk, shelf: Shelf) -> None:
    """While a step is in flight the load goes on, but asks nothing again."""
    hashes = desk.disk.block_hashes(NS, packed([*PROMPT, 0]))
    shelf.change(hashes[1], (bytes(1), None))
    desk.load([*PROMPT, 0])
    shelf.hand_over(1)
    first, fills, _ = desk.plan()
    assert len(fills) == 1
    shelf.hand_over(1)
    second, fills, _ = desk.plan()
    assert not fills
    assert shelf.known(hashes) == 1
    shelf.records[hashes[1]] = shelf.records[hashes[0]]  # somebody has written it again
    third, _, _ = desk.plan()
    assert shelf.known(hashes) == 2
    for number in (first, second, third):
        desk.disk.commit(number, ())
    assert not desk.disk.is_loading


def test_an_index_that_knows_of_too_few_parts_loads_nothing() -> None:
    """A bit of it has turned. Its checksum is asked for when it is read, which is later."""
    desk = Desk(groups=[RecurrentGroup(4, 8, BLOCK, 10_000)])
    serve(desk.store, PROMPT)
    desk.wait()
    desk.write()
    again = Desk(desk.shelf, groups=[RecurrentGroup(4, 8, BLOCK, 10_000)])
    last = desk.disk.block_hashes(NS, packed([*PROMPT, 0]))[-1]
    desk.shelf.change(last, (bytes(BLOCK_BYTES),))
    assert not again.load([*PROMPT, 0])


def test_what_takes_minutes_to_compute_is_waited_for_longer(desk: Desk, shelf: Shelf) -> None:
    """A disk that sleeps wakes up within seconds."""
    desk.load([*PROMPT, 0], compute_seconds=60.0)
    desk.wait(0.1 * 60.0 - 0.001)
    desk.step()
    assert desk.disk.is_loading
    desk.wait(0.002)
    desk.step()
    assert not desk.disk.is_loading


def test_a_load_that_the_disk_keeps_waiting_is_given_up(desk: Desk, shelf: Shelf) -> None:
    desk.load([*PROMPT, 0])
    waiting = pending()
    shelf.hand_over(4)
    desk.step()
    desk.wait(LOAD_RULES.timeout_seconds - 0.001)
    desk.step()
    assert desk.disk.is_loading
    assert desk.disk.wait_seconds() == pytest.approx(0.001)
    desk.wait(0.002)
    desk.step()
    assert not desk.disk.is_loading
    assert not waits(desk.store, waiting)
    assert shelf.tickets[0].is_over
    assert desk.cached(PROMPT) == 4 * BLOCK
    stats = desk.disk.stats()
    assert (stats.hits, stats.loaded_tokens, stats.given_up_loads) == (1, 4 * BLOCK, 1)


@pytest.mark.parametrize("namespace", [None, NS])
def test_a_clear_ends_it_and_leaves_nothing_held(
    desk: Desk, shelf: Shelf, namespace: Namespace | None
) -> None:
    desk.load([*PROMPT, 0])
    shelf.hand_over(4)
    number, _, _ = desk.plan()
    shelf.hand_over(2)  # on their way to the engine thread
    desk.disk.clear(namespace)
    desk.store.clear(namespace)
    desk.disk.commit(number, ())
    desk.step()
    assert not desk.disk.is_loading
    assert desk.cached(PROMPT) == 0
    assert desk.store.pool.n_free == 64


def test_its_namespace_is_known_before_anything_has_come(desk: Desk) -> None:
    assert desk.disk.namespaces == frozenset()
    desk.load([*PROMPT, 0])
    assert tree_of(desk.store).roots == {}
    assert desk.disk.namespaces == {NS}
    desk.disk.clear(NS)
    assert desk.disk.namespaces == frozenset()


def test_a_clear_of_another_namespace_does_not_end_it(desk: Desk) -> None:
    desk.load([*PROMPT, 0])
    desk.disk.clear(SALTED)
    assert desk.disk.is_loading


def test_where_nothing_can_be_filled_in_the_load_ends_without_a_step() -> None:
    """There would be none: all is in memory but for windows, and those have no room."""
    before = Desk(groups=(WindowGroup(0, WINDOW, 14, BLOCK, 10 * BLOCK),), n_windows=1)
    serve(before.store, PROMPT)
    before.wait()
    before.write()
    group = WindowGroup(0, WINDOW, 14, BLOCK, 10 * BLOCK)
    desk = Desk(before.shelf, groups=(group,), n_windows=1)
    serve(desk.store, PROMPT)
    other = admit(desk.store, run_of(500, 14 * BLOCK))
    while group.slots.n_referenced < group.slots.n_slots:
        assert desk.store.plan(other, 1) is None
    assert desk.load([*PROMPT, 0])
    before.shelf.hand_over(10)
    _, fills, _ = desk.plan()
    assert not fills
    assert not desk.disk.is_loading


def test_a_load_has_as_long_as_it_takes_while_something_comes(desk: Desk, shelf: Shelf) -> None:
    desk.load([*PROMPT, 0])
    for _ in range(10):
        desk.wait(LOAD_RULES.timeout_seconds - 0.001)
        shelf.hand_over(1)
        desk.step()
    assert desk.cached(PROMPT) == len(PROMPT)


def test_what_has_arrived_is_used_however_long_steps_take_to_fill_it_in(shelf: Shelf) -> None:
    desk = Desk(shelf, step_bytes=BLOCK_BYTES)
    desk.load([*PROMPT, 0])
    shelf.hand_over(10)
    for _ in range(10):
        desk.step()
        desk.wait(10 * LOAD_RULES.timeout_seconds)
    desk.step()
    assert desk.cached(PROMPT) == len(PROMPT)


@pytest.mark.parametrize(
    ("n_came", "again"), [(4, LoadOutcome.STARTED), (0, LoadOutcome.NOT_WORTH_IT)]
)
def test_one_that_was_given_up_is_asked_for_again_if_it_has_brought_something(
    desk: Desk, shelf: Shelf, n_came: int, again: LoadOutcome
) -> None:
    attempt = LoadAttempt()
    assert desk.ask([*PROMPT, 0], attempt) is LoadOutcome.STARTED
    if n_came:
        shelf.hand_over(n_came)
    for _ in range(2):
        desk.step()
        desk.wait(LOAD_RULES.timeout_seconds)
    desk.step()
    assert not desk.disk.is_loading
    assert desk.ask([*PROMPT, 0], attempt) is again


def test_filling_counts_where_it_is_slower_than_reading(shelf: Shelf) -> None:
    """Steps have shown how long it takes."""
    desk = Desk(shelf, load_rules=replace(LOAD_RULES, worth=0.5, first_rate=1e9))
    desk.load([*PROMPT, 0][: 5 * BLOCK + 1])
    shelf.hand_over(5)
    number, _, _ = desk.plan()
    desk.disk.observe([number], number, 5.0)
    desk.disk.commit(number, ())
    assert not desk.load([*PROMPT, 0], compute_seconds=9.9)
    assert desk.load([*PROMPT, 0], compute_seconds=10.1)


def test_a_step_fills_in_what_it_has_time_for_by_what_the_ones_before_took(shelf: Shelf) -> None:
    desk = Desk(shelf, step_bytes=2 * BLOCK_BYTES)
    desk.load([*PROMPT, 0])
    shelf.hand_over(10)
    number, fills, _ = desk.plan()
    assert len(fills) == 2
    assert desk.budget.added_seconds == 2 * BLOCK_BYTES
    desk.disk.observe([number], number, BLOCK_BYTES)  # half of what was thought
    desk.disk.commit(number, ())
    assert len(desk.step()[0]) == 4


def test_readers_go_ahead_as_far_as_steps_fill_in(shelf: Shelf) -> None:
    desk = Desk(shelf, step_bytes=3 * BLOCK_BYTES)
    desk.load([*PROMPT, 0])
    desk.step()
    assert shelf.tickets[0].most_ahead_bytes == 6 * BLOCK_BYTES
