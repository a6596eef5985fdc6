"""How long a refused client is told to stay away."""

import pytest

from engine.api import QueueFull
from engine.core.inbox import Inbox
from engine.core.loop import EngineLoop
from engine.core.metrics import PACE_WINDOW, QueuePace
from engine.core.request import prepare
from engine.values.request import Request
from tests.simulation.daemon import NO_BYTES
from tests.unit.engine_harness import Harness, prompt


def test_departures_go_on_as_they_went() -> None:
    pace = QueuePace()
    pace.joined(10, now=100.0)
    for now in (103.0, 106.0, 109.0):
        pace.left(now)
    assert pace.seconds_until_left(4, now=109.0) == pytest.approx(12.0)


def test_a_queue_that_has_come_to_a_stop_is_seen_to() -> None:
    pace = QueuePace()
    pace.joined(10, now=0.0)
    pace.left(now=1.0)
    assert pace.seconds_until_left(1, now=60.0) == pytest.approx(60.0)


def test_before_anybody_has_left_a_place_takes_as_long_as_the_wait_so_far() -> None:
    pace = QueuePace()
    assert pace.seconds_until_left(1, now=5.0) == 0.0
    pace.joined(10, now=5.0)
    assert pace.seconds_until_left(2, now=12.0) == pytest.approx(14.0)


def test_a_quiet_night_does_not_count() -> None:
    pace = QueuePace()
    pace.joined(2, now=0.0)
    pace.left(now=1.0)
    pace.left(now=2.0)
    pace.joined(1, now=30_000.0)
    assert pace.seconds_until_left(3, now=30_000.0) == pytest.approx(3.0)


def test_what_is_long_past_does_not_count() -> None:
    pace = QueuePace()
    pace.joined(100, now=0.0)
    for second in range(PACE_WINDOW + 1):
        pace.left(now=1000.0 + second)
    assert pace.seconds_until_left(5, now=1000.0 + PACE_WINDOW) == pytest.approx(5.0)


def test_a_refusal_tells_for_how_long_at_the_present_pace() -> None:
    now = 0.0
    harness = Harness(max_running=1, max_waiting=4, clock=lambda: now)
    inbox = Inbox()
    loop = EngineLoop(harness.scheduler, harness.runner, inbox, harness.take, NO_BYTES)

    def submit(name: str, client: str, n: int = 1) -> None:
        request = Request(name, tuple(prompt(1, 5)), max_tokens=1, n=n, client=client)
        harness.scheduler.add(prepare(request, harness.limits), arrived_seconds=now)

    def turn() -> None:
        nonlocal now
        inbox.post(lambda: None)
        loop.turn()
        now += 7.0

    submit("a", "flood", n=4)
    for _ in range(3):  # the first is collected in the second turn, and the next starts behind that
        turn()
    submit("b", "other")
    with pytest.raises(QueueFull, match=r"3 sequences wait, 1 of them this client's") as refusal:
        submit("c", "other", n=2)
    assert refusal.value.retry_after_seconds == 3 * 7
