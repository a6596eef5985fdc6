"""The benchmark of one step: that it runs through, and what it makes of the times."""

import pytest

from engine.measuring.step import STEPS, step_times, times_of
from engine.measuring.turned_engine import open_engine
from engine.values.settings import EngineConfig
from load_tests.bench.forward import table


def test_each_turn_says_a_token_for_every_row() -> None:
    """Else the engine raises. It starts anew for the next number of rows."""
    pair = open_engine(EngineConfig(""), rows=3, row_tokens=256)
    pair.engine.begin(3, prompt_tokens=20, max_tokens=100)
    pair.engine.seconds(steps=2)
    step_times(pair, rows=1, context_tokens=20, most_rounds=1, max_tokens=100)


def test_figures_are_medians_over_the_rounds() -> None:
    """Also the ratio, which is not that of the medians: the machine's pace changes both sides."""
    step = STEPS / 1e3  # a millisecond each
    taken = [(2 * step, 1 * step), (6 * step, 4 * step), (3 * step, 8 * step)]
    found = times_of(5, 256, taken)
    assert (found.engine_milliseconds, found.bare_milliseconds) == pytest.approx((3, 4))
    assert (found.least_ratio, found.ratio, found.greatest_ratio) == pytest.approx((0.375, 1.5, 2))
    assert table([found]).rows == (("5", "256", "3.00", "4.00", "1.500", "0.38", "2.00"),)
