"""Every count right and every output as when alone, whatever happens around it."""

import logging

import pytest

from tests.simulation.simulator import run

STEPS = 120


@pytest.mark.parametrize("seed", range(40))
def test_outputs_and_counts_hold_under_random_load(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL + 1)  # the faults are injected
    assert run(seed, STEPS) > 0
