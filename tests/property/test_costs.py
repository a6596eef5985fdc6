"""Whatever was measured: costs are not negative, and more work never fits where less does not."""

import math

from hypothesis import given
from hypothesis import strategies as st

from engine.core.budget import StepBudget, StepCosts, StepShape
from tests.unit.simulated_machine import limited

counts = st.integers(0, 100_000)
tokens = st.integers(1, 100_000)
positions = st.integers(0, 1_000_000)
spans = st.lists(st.tuples(positions, tokens), max_size=4).map(tuple)
seconds = st.floats(0, 1000)


@st.composite
def shapes(draw: st.DrawFn) -> StepShape:
    """Of a step with at least one forward. A row with a draft is one of its decodes."""
    drafts = draw(spans)
    keys = draw(counts) + sum(start + 1 for start, _ in drafts)
    chunks = draw(spans)
    least_rows = 0 if chunks and not drafts else max(len(drafts), 1)
    rows = draw(st.integers(least_rows, 100_000))
    scored_tokens = draw(st.integers(0, sum(n_tokens for _, n_tokens in chunks)))
    listed, pooled = draw(st.integers(0, rows)), draw(st.integers(0, len(chunks)))
    keys = keys if rows else 0
    return StepShape(rows, keys, chunks, drafts, scored_tokens, listed, pooled)


histories = st.lists(st.tuples(shapes(), seconds), max_size=40)
limits = st.floats(0.001, 10)


def _learned(history: list[tuple[StepShape, float]]) -> StepCosts:
    costs = StepCosts()
    for shape, taken in history:
        costs.observe(shape, taken)
    return costs


def _budget(costs: StepCosts, limit: float, rows: int, context: int) -> StepBudget:
    return limited(costs, limit, [context] * rows)


@given(histories, shapes(), counts, counts, spans)
def test_a_prediction_is_not_negative_and_grows_with_the_work(
    history: list[tuple[StepShape, float]],
    shape: StepShape,
    more_rows: int,
    more_keys: int,
    more_chunks: tuple[tuple[int, int], ...],
) -> None:
    costs = _learned(history)
    rows, keys = shape.decode_rows + more_rows, shape.decode_keys + more_keys
    more = shape._replace(decode_rows=rows, decode_keys=keys, chunks=shape.chunks + more_chunks)
    assert 0 <= costs.predict(shape) <= costs.predict(more) * (1 + 1e-9) < math.inf


@given(histories, positions, tokens, tokens)
def test_a_longer_chunk_and_a_longer_draft_never_take_less(
    history: list[tuple[StepShape, float]], start: int, n_tokens: int, more: int
) -> None:
    costs = _learned(history)
    longer = n_tokens + more
    assert costs.prompt_seconds(start, n_tokens) <= costs.prompt_seconds(start, longer)
    assert costs.draft_seconds(start, n_tokens) <= costs.draft_seconds(start, longer)
    assert costs.verify_seconds() >= 0


@given(histories, limits, st.integers(0, 64), positions, positions, tokens)
def test_a_first_chunk_is_never_empty_and_never_more_than_wanted(
    history: list[tuple[StepShape, float]],
    limit: float,
    rows: int,
    context: int,
    start: int,
    wanted: int,
) -> None:
    assert (
        1 <= _budget(_learned(history), limit, rows, context).chunk_tokens(start, wanted) <= wanted
    )


@given(histories, limits, limits, positions, tokens)
def test_more_time_never_allows_fewer_tokens(
    history: list[tuple[StepShape, float]], limit: float, other: float, start: int, wanted: int
) -> None:
    costs = _learned(history)
    worse, better = (_budget(costs, each, 4, 100) for each in sorted((limit, other)))
    assert worse.chunk_tokens(start, wanted) <= better.chunk_tokens(start, wanted)


@given(histories, limits, positions, positions, tokens)
def test_with_less_before_them_the_same_time_never_computes_fewer_tokens(
    history: list[tuple[StepShape, float]], taken: float, start: int, other: int, wanted: int
) -> None:
    costs = _learned(history)
    near, far = sorted((start, other))
    assert costs.tokens_within(taken, far, wanted) <= costs.tokens_within(taken, near, wanted)


@given(histories, limits, positions, tokens)
def test_what_is_allowed_is_predicted_to_end_in_time(
    history: list[tuple[StepShape, float]], limit: float, start: int, wanted: int
) -> None:
    costs = _learned(history)
    budget = _budget(costs, limit, 4, 100)
    decodes = budget.shape
    allowed = budget.chunk_tokens(start, wanted)
    budget.add_chunk(start, allowed)
    gather = costs.gather_seconds(start)
    before = costs.predict(decodes) + costs.begin_seconds(start)
    least = before + max(0.25 * (before - gather), gather)
    if allowed > 1:
        assert costs.predict(budget.shape) <= max(limit, least) * (1 + 1e-9)
