"""Many prompts come back at once: their loads have a budget, in the order of admission."""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

import pytest

from engine.core.step import StepPlan
from engine.disk_cache.cache import DiskCache
from engine.disk_cache.loader import LoadAttempt, LoadOutcome
from engine.disk_cache.transfers import LoadBudget, LoadLimits
from engine.values.request import WaitReason
from kvstore.disk.types import MIB
from tests.simulation.daemon import Layout
from tests.unit.disk_cache.desk import BLOCK_BYTES, LOAD_RULES, WRITE_RULES, Desk, Shelf
from tests.unit.engine_harness import VOCAB_SIZE, Harness, disk_of
from tests.unit.kv_helpers import BLOCK, admit, run_of, serve

CROWD = 24
PROMPT_BLOCKS = 10
PROMPT_BYTES = PROMPT_BLOCKS * BLOCK_BYTES
PROMPTS = [run_of(1000 * number, PROMPT_BLOCKS * BLOCK) for number in range(CROWD)]
TWO_AT_A_TIME = replace(LOAD_RULES, limits=LoadLimits(2 * PROMPT_BYTES, MIB))


@pytest.fixture(scope="module")
def before() -> Shelf:
    """What an earlier life has written of all of them."""
    desk = Desk(n_blocks=CROWD * PROMPT_BLOCKS)
    for prompt in PROMPTS:
        serve(desk.store, prompt)
    desk.wait()
    desk.write()
    return desk.shelf


@pytest.fixture
def shelf(before: Shelf) -> Shelf:
    return Shelf(records=dict(before.records))


def ask(desk: Desk, attempts: Sequence[LoadAttempt]) -> list[LoadOutcome]:
    """All of them, in one round."""
    desk.plan()
    return [
        desk.ask([*prompt, 0], attempt) for prompt, attempt in zip(PROMPTS, attempts, strict=False)
    ]


def test_a_crowd_pins_no_more_of_the_arena_than_the_budget(shelf: Shelf) -> None:
    desk = Desk(shelf, load_rules=TWO_AT_A_TIME, n_blocks=CROWD * PROMPT_BLOCKS)
    attempts = [LoadAttempt() for _ in PROMPTS]
    for round_number in range(CROWD // 2):
        found = ask(desk, attempts)
        assert desk.store.pool.n_referenced == 2 * PROMPT_BLOCKS
        begun = 2 * round_number
        assert found[begun : begun + 2] == [LoadOutcome.STARTED] * 2
        assert set(found[begun + 2 :]) <= {LoadOutcome.DEFERRED}
        for _ in range(2):
            shelf.hand_over(PROMPT_BLOCKS)
        desk.step()
    assert [desk.cached(prompt) for prompt in PROMPTS] == [len(PROMPTS[0])] * CROWD


def test_who_is_deferred_is_looked_up_once(shelf: Shelf) -> None:
    """A look asks for every entry: with a queue of long prompts it is not made in every step."""
    desk = Desk(shelf, load_rules=TWO_AT_A_TIME, n_blocks=CROWD * PROMPT_BLOCKS)
    attempts = [LoadAttempt() for _ in PROMPTS]
    ask(desk, attempts)
    shelf.records.clear()
    assert ask(desk, attempts)[2:] == [LoadOutcome.DEFERRED] * (CROWD - 2)


def test_a_load_that_is_alone_always_fits(shelf: Shelf) -> None:
    desk = Desk(shelf, load_rules=replace(LOAD_RULES, limits=LoadLimits(1, MIB)), n_blocks=64)
    assert ask(desk, [LoadAttempt(), LoadAttempt()]) == [LoadOutcome.STARTED, LoadOutcome.DEFERRED]


def test_nobody_overtakes_who_does_not_fit_until_all_are_asked_again() -> None:
    budget = LoadBudget(LoadLimits(100, 0))
    assert budget.takes(60)
    budget.began(60)
    assert not budget.takes(50)
    assert not budget.takes(40)
    budget.begin_round()
    assert budget.takes(40)


def test_who_found_no_blocks_asks_again_when_some_were_let_go(shelf: Shelf) -> None:
    desk, attempt = Desk(shelf, n_blocks=16), LoadAttempt()
    other = admit(desk.store, run_of(50_000, 12 * BLOCK))
    assert desk.ask([*PROMPTS[0], 0], attempt) is LoadOutcome.NO_BLOCKS
    assert desk.ask([*PROMPTS[0], 0], attempt) is LoadOutcome.NO_BLOCKS
    desk.store.release(other)
    assert desk.ask([*PROMPTS[0], 0], attempt) is LoadOutcome.STARTED


def test_what_is_read_ahead_of_all_loads_together_is_bounded(shelf: Shelf) -> None:
    ahead = 6 * BLOCK_BYTES
    limits = LoadLimits(1 << 30, ahead)
    desk = Desk(
        shelf, load_rules=replace(LOAD_RULES, limits=limits), n_blocks=CROWD * PROMPT_BLOCKS
    )
    ask(desk, [LoadAttempt() for _ in PROMPTS])
    assert [t.most_ahead_bytes for t in shelf.tickets] == [ahead // 2] * 2 + [0] * (CROWD - 2)


def test_what_loads_hold_counts_though_they_would_get_less_now() -> None:
    budget = LoadBudget(LoadLimits(1 << 30, 100))
    assert budget.ahead(math.inf, [0, 0, 0]) == [50, 50, 0]
    assert budget.ahead(2, [50, 50, 0, 0]) == [4, 4, 0, 0]
    assert budget.ahead(2, [50, 20, 0, 0]) == [4, 4, 4, 4]
    assert budget.ahead(10, [50, 20, 0, 0]) == [20, 20, 20, 10]
    assert budget.ahead(math.inf, [4, 4, 90]) == [6, 4, 50]


def test_what_loads_hold_never_exceeds_what_may_be_read_ahead(shelf: Shelf) -> None:
    """Whatever time steps have, from one to the next."""
    ahead = 8 * BLOCK_BYTES
    load_rules = replace(LOAD_RULES, limits=LoadLimits(1 << 30, ahead))
    n_blocks = CROWD * PROMPT_BLOCKS
    desk = Desk(shelf, load_rules=load_rules, n_blocks=n_blocks, step_bytes=BLOCK_BYTES)
    ask(desk, [LoadAttempt() for _ in PROMPTS])
    random = Random(0)
    while desk.disk.is_loading:
        desk.step_seconds = random.choice([0, BLOCK_BYTES, math.inf])
        desk.step()
        for ticket in shelf.tickets:
            while (
                not ticket.is_over and ticket.ahead_bytes + BLOCK_BYTES <= ticket.most_ahead_bytes
            ):
                shelf.hand_over_to(ticket, 1)
        assert sum(ticket.ahead_bytes for ticket in shelf.tickets) <= ahead


def test_who_may_not_be_read_yet_is_not_given_up(shelf: Shelf) -> None:
    limits = LoadLimits(1 << 30, 2 * BLOCK_BYTES)
    desk = Desk(
        shelf, load_rules=replace(LOAD_RULES, limits=limits), n_blocks=CROWD * PROMPT_BLOCKS
    )
    ask(desk, [LoadAttempt() for _ in range(3)])
    desk.step()
    for _ in range(PROMPT_BLOCKS):
        for ticket in shelf.tickets[:2]:
            shelf.hand_over_to(ticket, 1)
        desk.wait(LOAD_RULES.timeout_seconds - 0.1)
        desk.step()
    assert [desk.cached(prompt) > 0 for prompt in PROMPTS[:3]] == [True, True, False]
    assert desk.disk.is_loading


class Daemon(Harness):
    """A life of the hash model over a shelf."""

    def __init__(self, shelf: Shelf, limits: LoadLimits, max_running: int = 16) -> None:
        self.shelf = shelf
        self.posted = deque[Callable[[], None]]()
        load_rules = replace(LOAD_RULES, limits=limits)
        layout = Layout(VOCAB_SIZE, block_size=BLOCK, windows=(), has_states=False)
        super().__init__(
            n_blocks=CROWD * PROMPT_BLOCKS + 64,
            block_size=BLOCK,
            max_running=max_running,
            disk=lambda store: DiskCache(
                shelf, store, layout.part_bytes, 0, self.posted.append, WRITE_RULES, load_rules
            ),
        )
        self.block_bytes = layout.part_bytes[0]

    def step(self) -> StepPlan:
        while self.posted:
            self.posted.popleft()()
        return super().step()

    def write(self) -> None:
        """All that was computed goes to the shelf."""
        disk_of(self).end()
        while disk_of(self).is_busy:
            self.step()

    def read(self) -> None:
        """Whatever readers may read comes."""
        for ticket in self.shelf.tickets:
            if not ticket.is_over and ticket.most_ahead_bytes:
                self.shelf.hand_over_to(ticket, PROMPT_BLOCKS)


LIMITS = LoadLimits(0, 1 << 30)  # one load at a time
SAID = [[n % 40 for n in run_of(7 * number, PROMPT_BLOCKS * BLOCK)] for number in range(6)]


@pytest.fixture
def asked_before() -> tuple[Shelf, list[list[int]]]:
    """What was written of all prompts, and what was answered."""
    first = Daemon(Shelf(), LIMITS)
    answers = [first.output(first.serve(prompt)) for prompt in SAID]
    first.write()
    return first.shelf, answers


def test_a_crowd_is_loaded_in_the_order_of_admission_and_says_what_it_said(
    asked_before: tuple[Shelf, list[list[int]]],
) -> None:
    shelf, answers = asked_before
    again = Daemon(shelf, LIMITS)
    requests = [again.add(prompt) for prompt in SAID]
    again.step()
    assert len(shelf.tickets) == 1
    assert again.pool.n_referenced == PROMPT_BLOCKS - 1  # one token is always computed
    while again.scheduler.has_work:
        again.read()
        again.step()
    assert [again.output(request) for request in requests] == answers
    for request, prompt in zip(requests, SAID, strict=True):
        assert again.usage(request).cached_tokens >= len(prompt) - BLOCK


def test_who_is_loaded_and_who_is_deferred_wait_for_the_disk(
    asked_before: tuple[Shelf, list[list[int]]],
) -> None:
    shelf, _ = asked_before
    again = Daemon(shelf, LIMITS)
    loaded, put_off = again.add(SAID[0]), again.add(SAID[1])
    again.step()
    reasons = [again.scheduler.wait_reason(again.sequence(id)) for id in (loaded, put_off)]
    assert reasons == [WaitReason.DISK] * 2
    while not again.events[loaded]:
        again.read()
        again.step()
    assert again.scheduler.wait_reason(again.sequence(put_off)) is WaitReason.DISK, "it is read now"


def test_nothing_is_loaded_for_who_cannot_run(asked_before: tuple[Shelf, list[list[int]]]) -> None:
    shelf, _ = asked_before
    again = Daemon(shelf, LIMITS, max_running=1)
    again.add(run_of(1, 3), max_tokens=50)
    again.step()
    again.add(SAID[0])
    again.step()
    assert not shelf.tickets
    assert not disk_of(again).is_loading
