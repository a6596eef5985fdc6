"""A step's tokens are split into forwards: none twice, none too large, and as few as may be."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.mlx_backend.model.batching import (
    FORWARD_TOKENS,
    LADDER,
    Batching,
    ForwardBatch,
    ForwardCost,
    Grouping,
    RowGroups,
    StepForwards,
    joined,
    of_equal_length,
    padded,
    read_apart,
    row_groups,
)
from engine.mlx_backend.model.rows import TokenSpan

COST = ForwardCost(FORWARD_TOKENS, math.inf)
MANY_LAYERS = ForwardCost(FORWARD_TOKENS, math.inf, layers=100)
RUNGS = pytest.mark.parametrize("rung", LADDER, ids=[rung.name for rung in LADDER])


def blocks(*ids: int) -> np.ndarray:
    return np.array(ids, dtype=np.uint32)


def decodes(*stops: int) -> list[TokenSpan]:
    return [TokenSpan(stop - 1, 1, blocks(), index=index) for index, stop in enumerate(stops)]


def indices(groups: RowGroups) -> list[list[int]]:
    return [[span.index for span in group] for group in groups]


def in_order(groups: RowGroups) -> list[int]:
    return [span.index for group in groups for span in group]


def spans_of(*chunks: tuple[int, int, int]) -> list[TokenSpan]:
    """Of a start, a number of tokens and how many are read; their tokens lie one behind another."""
    found, first = list[TokenSpan](), 0
    for index, (start, n_tokens, n_read) in enumerate(chunks):
        found.append(
            TokenSpan(start, n_tokens, blocks(index), index=index, first_token=first, n_read=n_read)
        )
        first += n_tokens
    return found


def batches(forwards: StepForwards) -> list[ForwardBatch]:
    return [*forwards.prompts, *forwards.sampling]


def test_neighbours_stay_together_as_far_as_they_fit() -> None:
    cost = replace(COST, most_keys=100)
    assert indices(row_groups(decodes(50, 50, 50, 10), padded, cost)) == [[0, 1], [2, 3]]
    assert indices(row_groups(decodes(10, 10, 10, 10), padded, cost)) == [[0, 1, 2, 3]]
    assert indices(row_groups(decodes(500, 10, 20), padded, cost)) == [[0], [1, 2]]
    assert row_groups([], padded, cost) == []


def test_no_row_is_padded_beyond_the_context() -> None:
    """GPT-2 has a table of positions; what stands in memory behind it was read."""
    spans = spans_of((0, 9, 0), (92, 8, 0), (50, 5, 0), (95, 5, 0), (94, 5, 0))
    short = replace(COST, context_tokens=100)
    assert indices(padded(spans, COST)) == [[0, 1, 2, 3, 4]]
    assert indices(padded(spans, short)) == [[0, 2], [1], [3, 4]]
    assert indices(padded(decodes(99, 100, 100), short)) == [[0, 1, 2]]


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(1, 40)), max_size=24),
    st.integers(1, 2000),
    st.sampled_from([padded, of_equal_length]),
)
def test_each_span_is_in_one_group_and_none_is_too_large(
    chunks: list[tuple[int, int]], most_keys: int, grouping: Grouping
) -> None:
    spans = spans_of(*((start, length, 0) for start, length in chunks))
    groups = row_groups(spans, grouping, replace(COST, most_keys=most_keys))
    wholes = grouping(spans, COST)
    assert in_order(groups) == in_order(wholes)
    assert sorted(in_order(groups)) == [*range(len(spans))]
    for group in groups:
        assert len(group) == 1 or _keys(group) <= most_keys


@st.composite
def _chunk(draw: st.DrawFn) -> tuple[int, int, int]:
    """A start, a number of tokens and how many are read: none, the last, or some more."""
    n_tokens = draw(st.integers(1, 40))
    n_read = draw(st.integers(0, 1) | st.integers(0, n_tokens))
    return draw(st.integers(0, 300)), n_tokens, n_read


chunks = st.lists(_chunk())


@RUNGS
def test_rows_that_are_read_in_place_are_not_parted_by_their_keys(rung: Batching) -> None:
    """But for those that take no other row; longer chunks are parted as ever."""
    cost = ForwardCost(FORWARD_TOKENS, 1000, most_keys=6000, in_place_tokens=1)
    spans = decodes(5, 4000, 17, 3000, 9, 3500)
    gathered = batches(rung.arrange(spans, replace(cost, in_place_tokens=0)))
    assert len(gathered) > 1
    found = batches(rung.arrange(spans, cost))
    assert len(found) == (len(spans) if rung.int_offsets else 1)
    chunks = spans_of((4000, 40, 40), (0, 40, 40))
    assert rung.arrange(chunks, cost) == rung.arrange(chunks, replace(cost, in_place_tokens=0))


@RUNGS
@given(chunks=chunks, most_keys=st.integers(1, 5000))
def test_every_token_is_computed_once_in_order_and_read_where_it_is_to_be(
    rung: Batching, chunks: list[tuple[int, int, int]], most_keys: int
) -> None:
    spans = spans_of(*chunks)
    found = batches(rung.arrange(spans, replace(COST, most_keys=most_keys)))
    positions: list[list[int]] = [[] for _ in spans]
    for batch in found:
        for span in batch.spans:
            assert span.first_token - spans[span.index].first_token == (
                span.start - spans[span.index].start
            )
            positions[span.index] += range(span.start, span.stop)
    assert positions == [[*range(span.start, span.stop)] for span in spans]
    read = sorted(
        (span.index, span.n_read) for batch in found for span in batch.spans if span.n_read
    )
    assert read == [(span.index, span.n_read) for span in spans if span.n_read], "none is split"


@given(chunks=chunks, most_keys=st.integers(1, 5000))
def test_one_forward_reads_no_more_keys_than_it_may(
    chunks: list[tuple[int, int, int]], most_keys: int
) -> None:
    for batch in batches(joined(spans_of(*chunks), replace(MANY_LAYERS, most_keys=most_keys))):
        rows = sum(len(group) for group in batch.row_groups)
        assert rows == 1 or sum(map(_keys, batch.row_groups)) <= most_keys


@given(chunks=chunks)
def test_short_spans_share_one_forward_without_padding(chunks: list[tuple[int, int, int]]) -> None:
    spans = spans_of(*chunks)
    found = batches(joined(spans, MANY_LAYERS))
    assert len(found) == bool(spans)
    for batch in found:
        assert batch.token_indices().size == sum(span.n_tokens for span in spans)


def test_only_forwards_that_are_read_come_last() -> None:
    prompts, sampling = joined(spans_of((0, 40, 0), (9, 1, 1), (0, 7, 1)), MANY_LAYERS)
    assert (len(prompts), len(sampling)) == (0, 1)
    prompts, sampling = joined(spans_of((0, 40, 0), (0, 7, 0)), MANY_LAYERS)
    assert (len(prompts), len(sampling)) == (1, 0)


def test_a_span_stays_apart_where_its_last_layer_would_cost_more_than_a_forward() -> None:
    spans = spans_of((0, 1800, 1), (9, 1, 1), (0, 7, 1), (8000, 1800, 1), (8000, 1400, 1))
    prompts, sampling = joined(spans, MANY_LAYERS)
    assert [span.n_tokens for batch in prompts for span in batch.spans] == [1799, 1799]
    assert [span.n_tokens for batch in sampling for span in batch.spans] == [1400, 7, 1, 1, 1]


def test_what_is_read_of_a_prompt_goes_with_the_decodes() -> None:
    prompts, sampling = read_apart(padded)(spans_of((0, 40, 1), (9, 1, 1), (5, 9, 4)), COST)
    assert [span.n_tokens for batch in prompts for span in batch.spans] == [39, 5]
    assert [(span.start, span.n_tokens) for batch in sampling for span in batch.spans] == [
        (39, 1),
        (9, 1),
        (10, 4),
    ]


def test_a_span_that_is_read_from_its_first_token_on_shares_a_forward_however_long_it_is() -> None:
    one_layer = replace(COST, layers=1)
    prompts, sampling = joined(spans_of((9, 40, 40), (9, 40, 20), (7, 1, 1)), one_layer)
    assert [span.n_tokens for batch in prompts for span in batch.spans] == [20]
    (batch,) = sampling
    assert [span.n_tokens for span in batch.spans] == [40, 20, 1]
    assert batch.read_indices().tolist() == list(range(61))


def test_where_tokens_lie_and_which_are_read() -> None:
    long, short, decode = spans_of((0, 3, 1), (4, 2, 0), (7, 1, 1))
    several = ForwardBatch(((long,), (short,), (decode,)))
    assert several.token_indices().tolist() == [[0], [1], [2], [3], [4], [5]]
    assert several.read_indices().tolist() == [2, 5]
    rows = ForwardBatch(((long, short),))
    assert rows.token_indices().tolist() == [[0, 1, 2], [3, 4, 4]], "padded by the last token"
    assert rows.read_indices().tolist() == [2]
    (verified,) = spans_of((4, 2, 2))
    assert ForwardBatch(((long, verified),)).read_indices().tolist() == [2, 3, 4]
    assert list(long.split(2)) == [
        (0, replace(long, n_tokens=2, n_read=2)),
        (2, replace(long, start=2, n_tokens=1, first_token=2, n_read=1)),
    ]


def _keys(spans: Sequence[TokenSpan]) -> int:
    return len(spans) * max(span.stop for span in spans)
