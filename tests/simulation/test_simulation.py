"""Every count right and every output as when alone, whatever happens around it."""

import logging
from collections.abc import Callable
from functools import cache

import pytest

from engine.core.queue import Admission, WaitingQueue
from tests.profiles import examples
from tests.simulation.census import Census, Happening
from tests.simulation.simulator import run

SEEDS = (*range(577, 577 + max(40, examples(40))), 319)
"""The last seed finds a damaged record, which is rare within STEPS."""
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


def test_all_that_can_happen_happens(live: Live) -> None:
    census = Census()
    for seed in SEEDS:
        census += live(seed)[1]
    assert set(Happening) - census.keys() == set()


def test_first_come_first_served_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WaitingQueue, "begin_step", lambda queue: queue._served.clear())
    with pytest.raises(AssertionError, match="for its turn"):
        sum(run(seed, STEPS)[0] for seed in SEEDS)


def test_rows_that_nobody_gives_up_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Admission, "victim", lambda *args: None)
    with pytest.raises(AssertionError, match="steps for its turn"):
        sum(run(seed, STEPS)[0] for seed in SEEDS)
