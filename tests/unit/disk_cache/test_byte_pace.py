"""What moving bytes is predicted to take, and how many fit into a time."""

import math

import pytest

from engine.disk_cache.transfers import BytePace

UNSEEN_RATE = 100.0


def test_before_any_was_moved_bytes_take_what_reading_them_did() -> None:
    pace = BytePace()
    assert pace.bytes_in(2.0, UNSEEN_RATE) == 200
    assert pace.seconds(50, UNSEEN_RATE) == 0.5


def test_where_nothing_is_known_none_fit() -> None:
    assert BytePace().bytes_in(2.0) == 0


def test_without_a_limit_all_fit() -> None:
    pace = BytePace()
    assert pace.bytes_in(math.inf) == math.inf
    pace.observe(1000, 1.0)
    assert pace.bytes_in(math.inf) == math.inf


def test_what_was_seen_counts_and_not_the_rate_of_reading() -> None:
    pace = BytePace()
    pace.observe(1000, 4.0)
    assert pace.bytes_in(1.0, UNSEEN_RATE) == 250
    assert pace.seconds(500, UNSEEN_RATE) == 2.0


def test_a_step_that_was_held_up_for_no_time_says_nothing() -> None:
    pace = BytePace()
    pace.observe(1000, 0.0)
    assert pace.bytes_in(2.0, UNSEEN_RATE) == 200


def test_it_follows_a_machine_that_slows_down() -> None:
    pace = BytePace()
    pace.observe(1000, 1.0)
    for _ in range(20):
        pace.observe(1000, 3.0)
    assert pace.seconds(1000) == pytest.approx(3.0, rel=0.01)


@pytest.mark.parametrize("start_bytes", [1, 400, 100_000])
def test_steps_come_to_what_fits_though_each_takes_something_once(start_bytes: int) -> None:
    once_seconds, byte_seconds, limit_seconds = 0.01, 1e-4, 0.05
    pace, n_bytes = BytePace(), float(start_bytes)
    for _ in range(60):
        pace.observe(int(n_bytes), once_seconds + byte_seconds * n_bytes)
        n_bytes = max(pace.bytes_in(limit_seconds), 1.0)
    assert n_bytes == pytest.approx((limit_seconds - once_seconds) / byte_seconds, rel=0.02)
