"""Figures and tables."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from load_tests.client import Answer
from load_tests.conditions import observe
from load_tests.report import Table, percentile
from load_tests.scenarios.load import Run, Summary, run_table, summarize


def answer(first: float, gaps: tuple[float, ...], cached_tokens: int = 0) -> Answer:
    return Answer(
        wave=0,
        conversation=0,
        turn=0,
        started_seconds=0.0,
        first_token_seconds=first,
        latency_seconds=first + sum(gaps),
        gap_seconds=gaps,
        prompt_tokens=100,
        cached_tokens=cached_tokens,
        completion_tokens=len(gaps) + 1,
    )


def summary(wall_seconds: float) -> Summary:
    return summarize(Run(wall_seconds, (answer(0.5, (0.1, 0.1)),)))


def test_the_conditions_tell_the_versions_of_the_daemon_and_of_what_it_stands_on() -> None:
    assert {"rootstock-serve", "mlx", "mlx-lm"} <= set(observe(0, (), "").versions)


def test_percentiles_lie_between_neighbours() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([1.0, 2.0, 3.0, 4.0, 5.0], 95) == pytest.approx(4.8)
    assert percentile([7.0], 95) == 7.0
    assert percentile([], 50) == 0.0


@given(st.lists(st.floats(-1e6, 1e6), min_size=2))
def test_percentiles_agree_with_the_standard_library(values: list[float]) -> None:
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    for q in (5, 50, 95):
        assert percentile(values, q) == pytest.approx(cuts[q - 1], abs=1e-6)


def test_a_summary_adds_up_the_answers() -> None:
    run = Run(2.0, (answer(0.5, (0.1, 0.3)), answer(1.5, (0.2,), cached_tokens=99)))
    found = summarize(run)
    assert (found.requests, found.prompt_tokens, found.cached_tokens) == (2, 200, 99)
    assert found.completion_tokens == 5
    assert found.completion_tokens_per_second == 2.5
    assert found.first_token_seconds.p50 == 1.0
    assert found.gap_seconds.p50 == pytest.approx(0.2)
    assert found.gap_seconds.max == 0.3
    assert found.latency_seconds.max == pytest.approx(1.7)


def test_markdown_aligns_figures_to_the_right() -> None:
    table = Table(("scenario", "wall s"), (("burst", "1.00"),))
    assert table.markdown() == "| scenario | wall s |\n| --- | ---: |\n| burst | 1.00 |"


def test_the_table_has_a_cell_for_every_column() -> None:
    table = run_table([("burst", summary(1.0))])
    assert [len(row) for row in table.rows] == [len(table.columns)]
    assert table.rich().row_count == 1
