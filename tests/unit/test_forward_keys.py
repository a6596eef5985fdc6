"""Forwards are split where their rows would read too many keys at once."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.mlx_backend.model.batching import (
    FORWARD_TOKENS,
    ForwardCost,
    Grouping,
    of_equal_length,
    padded,
)
from engine.mlx_backend.model.forward import Piece
from engine.mlx_backend.model.forward_keys import bounded

COST = ForwardCost(FORWARD_TOKENS, math.inf)
NO_BLOCKS = np.zeros(0, dtype=np.uint32)


def decodes(*stops: int) -> list[Piece]:
    return [Piece(stop - 1, 1, NO_BLOCKS) for stop in stops]


def test_neighbours_stay_together_as_far_as_they_fit() -> None:
    group = bounded(padded, 100)
    assert group(decodes(50, 50, 50, 10), COST) == [[0, 1], [2, 3]]
    assert group(decodes(10, 10, 10, 10), COST) == [[0, 1, 2, 3]]
    assert group(decodes(500, 10, 20), COST) == [[0], [1, 2]]
    assert group([], COST) == []


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(1, 40)), max_size=24),
    st.integers(1, 2000),
    st.sampled_from([padded, of_equal_length]),
)
def test_each_piece_is_in_one_forward_and_none_is_too_large(
    chunks: list[tuple[int, int]], most_keys: int, grouping: Grouping
) -> None:
    pieces = [Piece(start, length, NO_BLOCKS) for start, length in chunks]
    parts = bounded(grouping, most_keys)(pieces, COST)
    wholes = grouping(pieces, COST)
    assert [index for part in parts for index in part] == [i for whole in wholes for i in whole]
    for part in parts:
        keys = len(part) * max(pieces[index].stop for index in part)
        assert len(part) == 1 or keys <= most_keys
