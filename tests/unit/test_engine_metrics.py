"""What the engine counts: its queue's pace, prefix cache hits of the last minutes, drafts."""

import pytest

from engine.api import QueueFull
from engine.core.inbox import Inbox
from engine.core.loop import EngineLoop
from engine.core.metrics import (
    HIT_INTERVAL_SECONDS,
    MOST_HIT_COUNTS,
    PACE_WINDOW,
    HitWindows,
    QueuePace,
)
from engine.core.scheduler import Scheduler
from engine.core.statistics import snapshot
from engine.values.request import Request
from engine.values.stats import DraftCounts, DraftSource, EngineStats, RecentHits
from engine.values.tokens import pack
from tests.simulation.daemon import NO_BYTES, NO_DECODE, NO_MEMORY
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
        request = Request(name, pack(prompt(1, 5)), max_tokens=1, n=n, client=client)
        scheduler = harness.scheduler
        scheduler.add(scheduler.prepare(request), arrived_seconds=now)

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


def noted(*counts: tuple[float, int, int]) -> HitWindows:
    made = HitWindows()
    for count in counts:
        made.note(*count)
    return made


def recent(hits: HitWindows, now: float) -> list[tuple[int, int]]:
    return [(window.queried_tokens, window.hit_tokens) for window in hits.recent(now)]


def test_without_an_admission_there_is_no_share() -> None:
    assert [window.share for window in HitWindows().recent(1e6)] == [None, None, None]
    assert RecentHits(60, 8, 2).share == 0.25


def test_each_window_has_what_came_within_it() -> None:
    hits = noted((1000, 100, 0), (1500, 300, 100), (1890, 400, 190))
    assert recent(hits, 1899) == [(100, 90), (100, 90), (400, 190)]
    assert recent(hits, 1920) == [(100, 90), (100, 90), (300, 190)], "the first is too old"


def test_old_hits_leave_the_windows_without_another_admission() -> None:
    hits = noted((1000, 100, 50))
    assert recent(hits, 1059) == [(100, 50)] * 3
    assert recent(hits, 1061) == [(0, 0), (100, 50), (100, 50)]
    assert recent(hits, 9999) == [(0, 0)] * 3


def test_a_reader_may_be_late_by_a_moment() -> None:
    """It has read the clock, and then an admission has come."""
    hits = noted((9.999, 0, 0), *((10.0 * n, n, n) for n in range(1, 92)))
    assert [window.seconds for window in hits.recent(909.998)] == [60, 300, 900]


def test_within_an_interval_the_last_count_stands() -> None:
    hits = noted((1000, 10, 1), (1004, 20, 2), (1009, 30, 3), (1065, 40, 4))
    assert recent(hits, 1069)[0] == (10, 1)
    assert recent(hits, 1068)[0] == (40, 4), "up to an interval longer than it says"


def test_it_is_bounded_and_still_knows_the_longest_window() -> None:
    n = 10 * MOST_HIT_COUNTS
    hits = noted(*((i * HIT_INTERVAL_SECONDS + 3, i, i // 2) for i in range(n)))
    assert len(hits._entries) == MOST_HIT_COUNTS
    last_seconds = (n - 1) * HIT_INTERVAL_SECONDS + 3
    assert recent(hits, last_seconds)[2] == (90, 45)
    assert recent(hits, last_seconds + HIT_INTERVAL_SECONDS - 3.001)[2] == (90, 45)


def stats_of(scheduler: Scheduler) -> EngineStats:
    return snapshot(scheduler, NO_BYTES, NO_MEMORY, NO_DECODE)


def test_every_source_is_counted_from_the_start() -> None:
    assert stats_of(Harness().scheduler).drafts == dict.fromkeys(DraftSource, DraftCounts())


def test_drafts_add_up_by_their_source_and_a_snapshot_stays_as_it_is() -> None:
    scheduler = Harness().scheduler
    before = stats_of(scheduler)
    scheduler.metrics.verified(DraftSource.TREE, 8, 8)
    scheduler.metrics.verified(DraftSource.TREE, 4, 0)
    scheduler.metrics.verified(DraftSource.OWN, 2, 1)
    drafts = stats_of(scheduler).drafts
    assert drafts[DraftSource.TREE] == DraftCounts(drafts=2, drafted_tokens=12, accepted_tokens=8)
    assert drafts[DraftSource.OWN] == DraftCounts(drafts=1, drafted_tokens=2, accepted_tokens=1)
    assert drafts[DraftSource.GRAMMAR] == DraftCounts()
    assert before.drafts[DraftSource.TREE] == DraftCounts()


def test_the_prompt_of_several_outputs_is_looked_up_once() -> None:
    """Outputs that share what the first of them has computed have found nothing in the cache."""
    harness = Harness(n_blocks=200)
    metrics = harness.scheduler.metrics
    for max_tokens, found in (4, 0), (4, 99), (1, 99):
        before = metrics.queried_prompt_tokens, metrics.cached_prompt_tokens
        name = harness.serve(prompt(1, 100), max_tokens, n=8)
        assert metrics.queried_prompt_tokens - before[0] == 100
        assert metrics.cached_prompt_tokens - before[1] == found
        assert harness.usage(name, 0).cached_tokens == found
    assert metrics.computed_prompt_tokens < 150
    cold = harness.serve(prompt(2, 100), 4, n=8)
    assert [harness.usage(cold, index).cached_tokens for index in range(8)] == [0] * 8


@pytest.mark.parametrize("max_tokens", [0, 1, 4])
def test_the_prompt_of_several_outputs_is_scored_once(max_tokens: int) -> None:
    harness = Harness(n_blocks=200)
    name = harness.serve(prompt(1, 100), max_tokens, n=8, prompt_logprobs=0)
    assert [len(harness.output(name, index)) for index in range(8)] == [max_tokens] * 8
    assert scored(harness, name) == [None, *prompt(1, 100)[1:]]
    assert harness.scheduler.metrics.computed_prompt_tokens <= 100 + 7, "the last tokens again"
    alone = harness.serve(prompt(2, 9), max_tokens, n=1, prompt_logprobs=0)
    assert scored(harness, alone) == [None, *prompt(2, 9)[1:]]


@pytest.mark.parametrize("n_steps", [1, 2, 3])
def test_others_score_the_rest_of_a_prompt_whose_first_output_has_failed(n_steps: int) -> None:
    harness = Harness(n_blocks=200, step_tokens=32)
    name = harness.add(prompt(1, 100), 2, n=3, prompt_logprobs=0)
    for _ in range(n_steps):
        harness.step()
    harness.scheduler.contain(harness.sequence(name), ValueError("of the first"))
    harness.finish()
    assert scored(harness, name) == [None, *prompt(1, 100)[1:]]
    assert [len(harness.output(name, index)) for index in range(3)] == [0, 2, 2]


def scored(harness: Harness, name: str) -> list[int | None]:
    """The tokens of the prompt's logprobs, of all outputs together."""
    entries = [entry for event in harness.events[name] for entry in event.prompt_logprobs]
    return [None if entry is None else entry.token_id for entry in entries]
