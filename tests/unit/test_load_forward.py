"""The benchmark of one step: that it runs through, and what it makes of the times."""

import pytest

from engine.measuring.engine_step import STEPS, EngineHarness, median_times, step_times
from engine.values.settings import EngineConfig
from load_tests.bench.forward import Found, table


def test_each_turn_says_a_token_for_every_row() -> None:
    """Otherwise the engine raises. It starts again for the next number of rows."""
    engine = EngineHarness(EngineConfig(""), rows=3, row_tokens=256)
    engine.begin(3, prompt_tokens=20, max_tokens=100)
    engine.decode_seconds(steps=2)
    step_times(engine, rows=1, context_tokens=20, most_rounds=1, max_tokens=100)


def test_figures_are_medians_over_the_rounds() -> None:
    """Also the ratio, which is not that of the medians: the machine's pace changes both sides."""
    step = STEPS / 1e3  # a millisecond each
    taken = [(2 * step, 1 * step), (6 * step, 4 * step), (3 * step, 8 * step)]
    found = median_times(taken)
    assert (found.engine_ms, found.bare_ms) == pytest.approx((3, 4))
    ratios = (found.least_times, found.engine_times, found.greatest_times)
    assert ratios == pytest.approx((0.375, 1.5, 2))
    assert table([Found(5, 256, found)]).rows == (
        ("5", "256", "3.00", "4.00", "1.500", "0.38", "2.00"),
    )
