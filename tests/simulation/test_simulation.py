"""Every count right and every output as when alone, whatever happens around it."""

import logging
from collections.abc import Callable
from functools import cache

import pytest

from tests.profiles import examples
from tests.simulation.census import Census, Happening
from tests.simulation.sabotage import SABOTAGES, Sabotage
from tests.simulation.simulator import run

SEEDS = (*range(577, 577 + max(40, examples(40))), 622, 635, 656, 711, 849, 1025, 1145, 1355)
"""The last are for what is rare within STEPS: in 622 and 635 steps are lost, in 656 a record of the
disk does not fit, in 711 a grammar cannot be answered, in 1025 steps are lost with images, in 1355
a sequence is admitted again while its row is in flight.
"""
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


@pytest.mark.parametrize("sabotage", SABOTAGES, ids=lambda sabotage: sabotage.mistake)
def test_a_mistake_is_found_out(monkeypatch: pytest.MonkeyPatch, sabotage: Sabotage) -> None:
    """By the seed that is noted, or by another if the load of that seed has changed since."""
    sabotage.apply(monkeypatch)
    with pytest.raises(AssertionError, match=sabotage.message):
        sum(run(seed, STEPS)[0] for seed in (sabotage.seed, *SEEDS))
