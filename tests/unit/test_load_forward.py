"""The benchmark of one step: that it runs through, and what it makes of the times."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.mlx_backend import assembly
from engine.values.settings import EngineConfig
from engine.values.stats import DecodeStats
from load_tests.bench.forward import Found, table
from measuring import engine_step
from measuring.engine_step import STEPS, EngineHarness, median_times, step_times
from tests.devices import cpu_attention

EAGER = EngineConfig("", decode="eager")


def test_each_turn_says_a_token_for_every_row() -> None:
    """Otherwise the engine raises. It starts again for the next number of rows."""
    engine = EngineHarness(EAGER, rows=3, row_tokens=256)
    engine.begin(3, prompt_tokens=20, max_tokens=100)
    engine.decode_seconds(steps=2)
    found = step_times(engine, rows=1, context_tokens=20, most_rounds=1, max_tokens=100)
    assert (found.compiled_share, found.decode) == (0.0, "eager")


def test_rows_begin_their_blocks_at_unlike_steps() -> None:
    engine = EngineHarness(EAGER, rows=1, row_tokens=256)
    lengths = engine.row_tokens(EAGER.block_size, 200)
    assert max(lengths) == 200
    assert len({length % EAGER.block_size for length in lengths}) == EAGER.block_size
    assert min(engine.row_tokens(8, 2)) == 1


@pytest.fixture
def build_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[float], None]]:
    """Let the kernels of models that are loaded now take this time to be built."""
    started = list["subprocess.Popen[bytes]"]()

    def set_seconds(seconds: float) -> None:
        def start(*_: object) -> "subprocess.Popen[bytes]":
            code = f"import time; time.sleep({seconds})"
            started.append(subprocess.Popen([sys.executable, "-S", "-c", code]))
            return started[-1]

        monkeypatch.setattr(assembly, "start_building", start)

    monkeypatch.setattr(assembly, "compiler_problem", lambda: "")
    monkeypatch.setattr(assembly, "marker", lambda *_: tmp_path / "none")
    yield set_seconds
    for process in started:
        process.kill()
        process.wait()


@cpu_attention
def test_nothing_is_measured_before_a_decode_path_is_chosen(
    build_in: Callable[[float], None],
) -> None:
    build_in(0.5)
    engine = EngineHarness(EngineConfig(""), rows=1, row_tokens=256)
    assert engine.decode().is_chosen


@cpu_attention
def test_a_choice_that_takes_too_long_is_not_awaited(
    build_in: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The figures say so."""
    build_in(60.0)
    monkeypatch.setattr(engine_step, "CHOICE_SECONDS", 0.3)
    engine = EngineHarness(EngineConfig(""), rows=1, row_tokens=256)
    found = step_times(engine, rows=1, context_tokens=20, most_rounds=1, max_tokens=100)
    assert (found.compiled_share, found.decode) == (0.0, "not chosen")


def test_figures_are_medians_over_the_rounds() -> None:
    """Also the ratio, which is not that of the medians: the machine's pace changes both sides."""
    step = STEPS / 1e3  # a millisecond each
    taken = [(2 * step, 1 * step), (6 * step, 4 * step), (3 * step, 8 * step)]
    before, after = DecodeStats("eager: as set", 10, 4), DecodeStats("compiled: faster", 50, 34)
    found = median_times(taken, before, after)
    assert (found.engine_ms, found.bare_ms) == pytest.approx((3, 4))
    ratios = (found.least_times, found.engine_times, found.greatest_times)
    assert ratios == pytest.approx((0.375, 1.5, 2))
    assert table([Found(5, 256, found)]).rows == (
        ("5", "256", "3.00", "4.00", "1.500", "0.38", "2.00", "75%"),
    )
