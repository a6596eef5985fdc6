"""An engine with nothing to do recounts its store, and stands aside for whoever comes."""

import logging

import pytest

from engine.core.idle_recount import IDLE_SECONDS, IdleRecount
from engine.core.inbox import Inbox
from kvstore.invariants import recount_idle
from kvstore.pool import BlockPool
from kvstore.store import KVStore
from kvstore.tree import RadixTree

BLOCK = 4


class Clock:
    seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


class CountedInbox(Inbox):
    """Sleeps by the clock. There is a call when somebody has looked so often."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.slept = list[float | None]()
        self.looks_left = 1_000_000
        self._clock = clock

    @property
    def n_calls(self) -> int:
        self.looks_left -= 1
        return int(self.looks_left < 0)

    def wait(self, timeout_seconds: float | None = None) -> None:
        self.slept.append(timeout_seconds)
        self._clock.seconds += timeout_seconds or 0.0


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def inbox(clock: Clock) -> CountedInbox:
    return CountedInbox(clock)


@pytest.fixture
def store() -> KVStore:
    pool = BlockPool(8)
    return KVStore(pool, RadixTree(pool, BLOCK), BLOCK)


def break_references(store: KVStore) -> None:
    """One that nobody has."""
    store.pool.retain(store.pool.allocate(1))


def test_before_anything_was_computed_it_sleeps_until_called(
    store: KVStore, inbox: CountedInbox, clock: Clock
) -> None:
    break_references(store)
    recount = IdleRecount(store, inbox, clock)
    recount.rest(None)
    assert inbox.slept == [None]
    assert recount.n_problems == 0


def test_a_contradiction_is_found_once_and_said(
    store: KVStore, inbox: CountedInbox, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    break_references(store)
    recount = IdleRecount(store, inbox, clock)
    recount.changed()
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            recount.rest(None)
    assert inbox.slept == [IDLE_SECONDS, None]
    assert recount.n_problems > 0
    assert len(caplog.records) == 1
    assert "contradicts itself" in caplog.text


def test_who_calls_all_the_time_does_not_keep_it_from_counting(
    store: KVStore, inbox: CountedInbox, clock: Clock
) -> None:
    """As whoever watches the cache does."""
    break_references(store)
    recount = IdleRecount(store, inbox, clock)
    recount.changed()
    clock.seconds += IDLE_SECONDS
    for _ in range(200):
        inbox.looks_left = 1
        recount.rest(None)
    assert recount.n_problems > 0


def test_a_call_that_changes_the_store_makes_it_begin_again(
    store: KVStore, inbox: CountedInbox, clock: Clock
) -> None:
    break_references(store)
    recount = IdleRecount(store, inbox, clock)
    recount.changed()
    clock.seconds += IDLE_SECONDS
    inbox.looks_left = 3
    recount.rest(None)
    store.pool.release([store.pool.allocate(1)[0]])
    for _ in range(200):
        inbox.looks_left = 1
        recount.rest(None)
    assert recount.n_problems == len([found for found in recount_idle(store) if found is not None])


def test_a_disk_that_wants_a_turn_soon_gets_it(
    store: KVStore, inbox: CountedInbox, clock: Clock
) -> None:
    recount = IdleRecount(store, inbox, clock)
    recount.changed()
    recount.rest(IDLE_SECONDS / 2)
    assert inbox.slept == [IDLE_SECONDS / 2]
