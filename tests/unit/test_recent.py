"""Prefix cache hits of the last minutes."""

from engine.core.metrics import HIT_INTERVAL_SECONDS, MOST_HIT_COUNTS, HitWindows
from engine.values.stats import RecentHits


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
