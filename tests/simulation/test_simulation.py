"""Every count right and every output as when alone, whatever happens around it."""

import logging
from collections.abc import Callable, Iterator
from functools import cache

import pytest

from engine.policy import admission_key
from engine.sequence import LiveSequence
from engine.waiting import WaitingQueue
from tests.simulation.census import Census, Happening
from tests.simulation.simulator import run

SEEDS = range(9, 49)
STEPS = 80

Live = Callable[[int], tuple[int, Census]]


@pytest.fixture(scope="module")
def live() -> Live:
    """Each seed's simulation runs once."""
    return cache(lambda seed: run(seed, STEPS))


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL + 1)  # the faults are injected


@pytest.mark.parametrize("seed", SEEDS)
def test_outputs_and_counts_hold_under_random_load(live: Live, seed: int) -> None:
    turns, _ = live(seed)
    assert turns > 0


def test_all_that_can_happen_to_the_disk_cache_happens(live: Live) -> None:
    census = Census()
    for seed in SEEDS:
        census += live(seed)[1]
    assert set(Happening) - census.keys() == set()


def test_first_come_first_served_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_arrival(
        queue: WaitingQueue, may_start: Callable[[LiveSequence], bool]
    ) -> Iterator[LiveSequence]:
        everyone = [*queue._preempted, *(s for line in queue._lines.values() for s in line)]
        return filter(may_start, sorted(everyone, key=admission_key))

    monkeypatch.setattr(WaitingQueue, "turns", by_arrival)
    with pytest.raises(AssertionError, match="waited for its turn"):
        sum(run(seed, STEPS)[0] for seed in SEEDS)
