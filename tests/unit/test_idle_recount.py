"""An engine with nothing to do recounts its store, and drops that for whoever comes."""

import logging

import pytest

from engine.loop.idle_recount import IDLE_SECONDS, IdleRecount
from engine.loop.inbox import Inbox
from kvstore.blocks.pool import BlockPool
from kvstore.index.radix_tree import RadixTree
from kvstore.store import KVStore

BLOCK = 4


class SleeplessInbox(Inbox):
    """Notes for how long it was to sleep. With `calls` there is one whenever somebody looks."""

    def __init__(self, calls: bool = False) -> None:
        super().__init__()
        self.slept = list[float | None]()
        self._calls_come = calls

    @property
    def has_calls(self) -> bool:
        return self._calls_come

    def wait(self, timeout_seconds: float | None = None) -> None:
        self.slept.append(timeout_seconds)


def broken_store() -> KVStore:
    """A reference that nobody has."""
    pool = BlockPool(8)
    store = KVStore(pool, RadixTree(pool, BLOCK), BLOCK)
    pool.retain(pool.allocate(1))
    return store


def test_it_sleeps_until_called_before_anything_was_computed() -> None:
    inbox = SleeplessInbox()
    recount = IdleRecount(broken_store(), inbox)
    recount.rest(None)
    assert inbox.slept == [None]
    assert recount.n_problems == 0


def test_a_contradiction_is_found_once_and_said(caplog: pytest.LogCaptureFixture) -> None:
    inbox = SleeplessInbox()
    recount = IdleRecount(broken_store(), inbox)
    recount.stepped()
    with caplog.at_level(logging.ERROR):
        recount.rest(None)
        recount.rest(None)
    assert inbox.slept == [IDLE_SECONDS, None]
    assert recount.n_problems > 0
    assert len(caplog.records) == 1
    assert "contradicts itself" in caplog.text


def test_whoever_comes_goes_first_and_it_is_counted_when_all_is_quiet_again() -> None:
    inbox = SleeplessInbox(calls=True)
    recount = IdleRecount(broken_store(), inbox)
    recount.stepped()
    recount.rest(None)
    assert recount.n_problems == 0
    recount.rest(None)
    assert inbox.slept == [IDLE_SECONDS, IDLE_SECONDS]


def test_a_disk_that_wants_a_turn_soon_gets_it() -> None:
    inbox = SleeplessInbox()
    recount = IdleRecount(broken_store(), inbox)
    recount.stepped()
    recount.rest(IDLE_SECONDS / 2)
    assert inbox.slept == [IDLE_SECONDS / 2]
    assert recount.n_problems == 0
