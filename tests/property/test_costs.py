"""Whatever was measured: costs are not negative, and more work never fits where less does not."""

import math

from hypothesis import given
from hypothesis import strategies as st

from engine.core.budget import StepBudget, StepCosts
from engine.core.step import StepWork, chunk_beginning
from tests.unit.simulated_machine import beside

counts = st.integers(0, 100_000)
works = st.builds(StepWork, st.integers(1, 64), *[counts] * 7)
seconds = st.floats(0, 1000)
histories = st.lists(st.tuples(works, seconds), max_size=60)
tokens = st.integers(1, 100_000)
positions = st.integers(0, 1_000_000)
limits = st.floats(0.001, 10)


def _learned(history: list[tuple[StepWork, float]]) -> StepCosts:
    costs = StepCosts()
    for work, taken in history:
        costs.observe(work, taken)
    return costs


def _budget(costs: StepCosts, limit: float, rows: int, context: int) -> StepBudget:
    return beside(costs, limit, [context] * rows)


@given(histories, works, works)
def test_a_prediction_is_not_negative_and_grows_with_the_work(
    history: list[tuple[StepWork, float]], work: StepWork, more: StepWork
) -> None:
    costs = _learned(history)
    assert 0 <= costs.seconds(work) <= costs.seconds(work.plus(more)) < math.inf


@given(histories, limits, st.integers(0, 64), positions, positions, tokens)
def test_a_first_chunk_is_never_empty_and_never_more_than_wanted(
    history: list[tuple[StepWork, float]],
    limit: float,
    rows: int,
    context: int,
    start: int,
    wanted: int,
) -> None:
    assert 1 <= _budget(_learned(history), limit, rows, context).allow(start, wanted) <= wanted


@given(histories, limits, limits, positions, tokens)
def test_more_time_never_allows_fewer_tokens(
    history: list[tuple[StepWork, float]], limit: float, other: float, start: int, wanted: int
) -> None:
    costs = _learned(history)
    worse, better = (_budget(costs, each, 4, 100) for each in sorted((limit, other)))
    assert worse.allow(start, wanted) <= better.allow(start, wanted)


@given(histories, limits, positions, positions, tokens)
def test_with_less_before_them_the_same_time_never_computes_fewer_tokens(
    history: list[tuple[StepWork, float]], taken: float, start: int, other: int, wanted: int
) -> None:
    costs = _learned(history)
    near, far = sorted((start, other))
    assert costs.chunk_tokens(far, taken, wanted) <= costs.chunk_tokens(near, taken, wanted)


@given(histories, limits, positions, tokens)
def test_what_is_allowed_is_predicted_to_end_in_time(
    history: list[tuple[StepWork, float]], limit: float, start: int, wanted: int
) -> None:
    costs = _learned(history)
    budget = _budget(costs, limit, 4, 100)
    decodes = budget.work
    allowed = budget.allow(start, wanted)
    budget.chunk(start, allowed)
    gather = costs.seconds(StepWork(gathered_keys=start))
    before = costs.seconds(decodes.plus(chunk_beginning(start)))
    least = before + max(0.25 * (before - gather), gather)
    if allowed > 1:
        assert costs.seconds(budget.work) <= max(limit, least) * (1 + 1e-9)


@given(histories, st.lists(st.tuples(positions, tokens), max_size=5))
def test_chunks_are_counted_as_positions_that_see_all_before_them_and_gather_it(
    history: list[tuple[StepWork, float]], chunks: list[tuple[int, int]]
) -> None:
    budget = StepBudget(_learned(history), 1.0)
    for start, n_tokens in chunks:
        budget.chunk(start, min(n_tokens, 100))
    assert budget.work == StepWork(
        forwards=len(chunks),
        prompt_tokens=sum(min(n, 100) for _, n in chunks),
        prompt_keys=sum(
            position + 1 for start, n in chunks for position in range(start, start + min(n, 100))
        ),
        gathered_keys=sum(start + min(n, 100) for start, n in chunks),
    )
