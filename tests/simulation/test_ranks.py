"""Two ranks hold the same after each step."""

import pytest

from tests.profiles import examples
from tests.simulation.ranks import run_ranks

STEPS = 10_000
TURNS = 200


@pytest.mark.parametrize("seed", range(9000, 9000 + examples(8)))
def test_arenas_and_tables_are_equal(seed: int) -> None:
    assert run_ranks(seed, TURNS) > 0


@pytest.mark.slow
def test_for_many_steps() -> None:
    n_steps, seed = 0, 9500
    while n_steps < STEPS:
        n_steps += run_ranks(seed, TURNS)
        seed += 1
