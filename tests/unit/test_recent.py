"""Hits of the last minutes."""

from engine.values.stats import INTERVAL_SECONDS, KEPT, HitCount, HitRecord, RecentHits


def record(*counts: tuple[float, int, int]) -> HitRecord:
    made = HitRecord()
    for count in counts:
        made = made.noted(HitCount(*count))
    return made


def recent(hits: HitRecord, now: float) -> list[tuple[int, int]]:
    return [(window.queried_tokens, window.hit_tokens) for window in hits.recent(now)]


def test_nothing_was_asked() -> None:
    assert [window.share for window in HitRecord().recent(1e6)] == [None, None, None]
    assert RecentHits(60, 8, 2).share == 0.25


def test_each_window_has_what_came_within_it() -> None:
    hits = record((1000, 100, 0), (1500, 300, 100), (1890, 400, 190))
    assert recent(hits, 1899) == [(100, 90), (100, 90), (400, 190)]
    assert recent(hits, 1920) == [(100, 90), (100, 90), (300, 190)], "the first is too old"


def test_what_is_old_goes_though_nothing_is_noted_any_more() -> None:
    hits = record((1000, 100, 50))
    assert recent(hits, 1059) == [(100, 50)] * 3
    assert recent(hits, 1061) == [(0, 0), (100, 50), (100, 50)]
    assert recent(hits, 9999) == [(0, 0)] * 3


def test_within_an_interval_the_last_count_stands() -> None:
    hits = record((1000, 10, 1), (1004, 20, 2), (1009, 30, 3), (1065, 40, 4))
    assert len(hits.past) == 2, "the start, and one for the first interval"
    assert recent(hits, 1069)[0] == (10, 1)
    assert recent(hits, 1068)[0] == (40, 4), "up to an interval longer than it says"


def test_it_is_bounded_and_still_knows_the_longest_window() -> None:
    n = 10 * KEPT
    hits = record(*((i * INTERVAL_SECONDS + 3, i, i // 2) for i in range(n)))
    assert len(hits.past) == KEPT
    now = hits.last.seconds + INTERVAL_SECONDS - 3.001
    assert recent(hits, now)[2] == (90, 45)
