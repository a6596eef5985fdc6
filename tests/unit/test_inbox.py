"""The ways in to the engine thread: what waits, and for how long."""

import pytest

from engine.api import EngineStopped
from engine.core.inbox import CALLS_AT_ONCE, Inbox


def test_calls_are_made_in_order_and_a_bounded_number_between_two_steps() -> None:
    inbox, made = Inbox(), list[int]()
    for i in range(2 * CALLS_AT_ONCE + 1):
        inbox.post(lambda i=i: made.append(i))  # type: ignore[misc]
    turns = []
    for _ in range(3):
        inbox.handle()
        turns.append(len(made))
    assert turns == [CALLS_AT_ONCE, 2 * CALLS_AT_ONCE, 2 * CALLS_AT_ONCE + 1]
    assert made == sorted(made)


def test_an_end_does_not_wait_behind_others() -> None:
    inbox, made = Inbox(), list[str]()
    for _ in range(10 * CALLS_AT_ONCE):
        inbox.post(lambda: made.append("submission"))
    inbox.post(lambda: made.append("abort"), urgent=True)
    inbox.handle()
    assert made == ["abort", *["submission"] * CALLS_AT_ONCE]


def test_an_end_that_comes_while_calls_are_made_is_the_next() -> None:
    inbox, made = Inbox(), list[str]()
    inbox.post(lambda: inbox.post(lambda: made.append("abort"), urgent=True))
    inbox.post(lambda: made.append("submission"))
    inbox.handle()
    assert made == ["abort", "submission"]


def test_what_is_cancelled_in_time_is_not_called() -> None:
    inbox, made = Inbox(), list[str]()
    assert inbox.post(lambda: made.append("cancelled")).cancel()
    inbox.post(lambda: made.append("called"))
    inbox.handle()
    assert made == ["called"]


def test_a_closed_inbox_refuses_what_it_has_and_what_comes() -> None:
    inbox = Inbox()
    waiting = [inbox.post(int), inbox.post(int, urgent=True)]
    inbox.close()
    for call in waiting:
        with pytest.raises(EngineStopped):
            call.result(timeout=0)
    with pytest.raises(EngineStopped):
        inbox.post(int)
