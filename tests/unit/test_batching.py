"""A step's tokens are split into forwards: none twice, none too large, and as few as may be."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.mlx_backend.model.batching import LADDER, Batching, joined, lasts_apart
from engine.mlx_backend.model.forward import Piece
from engine.mlx_backend.model.forward_batch import ForwardBatch, Run, StepForwards
from engine.mlx_backend.model.grouping import (
    FORWARD_TOKENS,
    ForwardCost,
    Grouping,
    bounded,
    of_equal_length,
    padded,
)

COST = ForwardCost(FORWARD_TOKENS, math.inf)
MANY_LAYERS = ForwardCost(FORWARD_TOKENS, math.inf, layers=100)
RUNGS = pytest.mark.parametrize("rung", LADDER, ids=[rung.name for rung in LADDER])


def blocks(*ids: int) -> np.ndarray:
    return np.array(ids, dtype=np.uint32)


def decodes(*stops: int) -> list[Piece]:
    return [Piece(stop - 1, 1, blocks()) for stop in stops]


def runs_of(*chunks: tuple[int, int, int]) -> list[Run]:
    """Of a start, a number of tokens and how many are read; their tokens lie one behind another."""
    found, first = list[Run](), 0
    for index, (start, n_tokens, n_read) in enumerate(chunks):
        found.append(Run(Piece(start, n_tokens, blocks(index)), index, first, n_read))
        first += n_tokens
    return found


def batches(forwards: StepForwards) -> list[ForwardBatch]:
    return [*forwards.prompts, *forwards.sampling]


def test_neighbours_stay_together_as_far_as_they_fit() -> None:
    group, cost = bounded(padded), replace(COST, most_keys=100)
    assert group(decodes(50, 50, 50, 10), cost) == [[0, 1], [2, 3]]
    assert group(decodes(10, 10, 10, 10), cost) == [[0, 1, 2, 3]]
    assert group(decodes(500, 10, 20), cost) == [[0], [1, 2]]
    assert group([], cost) == []


def test_no_row_is_padded_beyond_the_context() -> None:
    """GPT-2 has a table of positions; what stands in memory behind it was read."""
    pieces = [
        Piece(start, n, blocks()) for start, n in ((0, 9), (92, 8), (50, 5), (95, 5), (94, 5))
    ]
    assert padded(pieces, COST) == [[0, 1, 2, 3, 4]]
    assert padded(pieces, replace(COST, context_tokens=100)) == [[0, 2], [1], [3, 4]]
    assert padded(decodes(99, 100, 100), replace(COST, context_tokens=100)) == [[0, 1, 2]]


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(1, 40)), max_size=24),
    st.integers(1, 2000),
    st.sampled_from([padded, of_equal_length]),
)
def test_each_piece_is_in_one_group_and_none_is_too_large(
    chunks: list[tuple[int, int]], most_keys: int, grouping: Grouping
) -> None:
    pieces = [Piece(start, length, blocks()) for start, length in chunks]
    parts = bounded(grouping)(pieces, replace(COST, most_keys=most_keys))
    wholes = grouping(pieces, COST)
    assert [index for part in parts for index in part] == [i for whole in wholes for i in whole]
    for part in parts:
        assert len(part) == 1 or _keys([pieces[index] for index in part]) <= most_keys


chunks = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 40), st.integers(0, 1)))


@RUNGS
@given(chunks=chunks, most_keys=st.integers(1, 5000))
def test_every_token_is_computed_once_in_order_and_read_where_it_is_to_be(
    rung: Batching, chunks: list[tuple[int, int, int]], most_keys: int
) -> None:
    runs = runs_of(*chunks)
    found = batches(rung.arrange(runs, replace(COST, most_keys=most_keys)))
    positions: list[list[int]] = [[] for _ in runs]
    for batch in found:
        for run in batch.runs:
            piece = run.piece
            assert run.first_token - runs[run.index].first_token == (
                piece.start - runs[run.index].piece.start
            )
            positions[run.index] += range(piece.start, piece.stop)
    assert positions == [[*range(run.piece.start, run.piece.stop)] for run in runs]
    read = sorted(run.index for batch in found for run in batch.runs if run.n_read)
    assert read == [run.index for run in runs if run.n_read]


@given(chunks=chunks, most_keys=st.integers(1, 5000))
def test_one_forward_reads_no_more_keys_than_it_may(
    chunks: list[tuple[int, int, int]], most_keys: int
) -> None:
    for batch in batches(joined(runs_of(*chunks), replace(MANY_LAYERS, most_keys=most_keys))):
        rows = sum(len(part) for part in batch.parts)
        assert rows == 1 or sum(map(_keys, batch.pieces)) <= most_keys


@given(chunks=chunks)
def test_short_runs_share_one_forward_without_padding(chunks: list[tuple[int, int, int]]) -> None:
    runs = runs_of(*chunks)
    found = batches(joined(runs, MANY_LAYERS))
    assert len(found) == bool(runs)
    for batch in found:
        assert batch.token_indices().size == sum(run.piece.n_tokens for run in runs)


def test_only_forwards_that_are_read_come_last() -> None:
    prompts, sampling = joined(runs_of((0, 40, 0), (9, 1, 1), (0, 7, 1)), MANY_LAYERS)
    assert (len(prompts), len(sampling)) == (0, 1)
    prompts, sampling = joined(runs_of((0, 40, 0), (0, 7, 0)), MANY_LAYERS)
    assert (len(prompts), len(sampling)) == (1, 0)


def test_a_run_stays_apart_where_its_last_layer_would_cost_more_than_a_forward() -> None:
    runs = runs_of((0, 1800, 1), (9, 1, 1), (0, 7, 1), (8000, 1800, 1), (8000, 1400, 1))
    prompts, sampling = joined(runs, MANY_LAYERS)
    assert [run.piece.n_tokens for batch in prompts for run in batch.runs] == [1799, 1799]
    assert [run.piece.n_tokens for batch in sampling for run in batch.runs] == [1400, 7, 1, 1, 1]


def test_the_last_token_of_a_prompt_goes_with_the_decodes() -> None:
    prompts, sampling = lasts_apart(padded)(runs_of((0, 40, 1), (9, 1, 1)), COST)
    assert [run.piece.n_tokens for batch in prompts for run in batch.runs] == [39]
    assert [run.piece.start for batch in sampling for run in batch.runs] == [39, 9]


def test_where_tokens_lie_and_which_are_read() -> None:
    long, short, decode = runs_of((0, 3, 1), (4, 2, 0), (7, 1, 1))
    parted = ForwardBatch(((long,), (short,), (decode,)))
    assert parted.token_indices().tolist() == [[0], [1], [2], [3], [4], [5]]
    assert parted.read_indices().tolist() == [2, 5]
    rows = ForwardBatch(((long, short),))
    assert rows.token_indices().tolist() == [[0, 1, 2], [3, 4, 4]], "padded by the last token"
    assert rows.read_indices().tolist() == [2]
    assert [part.piece for _, part in long.pieces(2)] == [
        Piece(0, 2, long.piece.blocks),
        Piece(2, 1, long.piece.blocks),
    ]


def _keys(pieces: Sequence[Piece]) -> int:
    return len(pieces) * max(piece.stop for piece in pieces)
