"""A row of values as a grid: every search finds what a search through the row finds."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.mlx_backend.sampling.exponential import exp2
from engine.mlx_backend.sampling.grid import Grid

VOCABULARIES = (1, 7, 64, 67, 134, 151_936)
sizes = st.sampled_from([1, 2, 7, 64, 67, 134, 256])


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_a_grid_has_a_place_for_each_token(vocab_size: int) -> None:
    grid = Grid.of(vocab_size)
    assert grid.strips * grid.columns == vocab_size
    assert 1 <= grid.strips <= 64


@given(size=sizes, seed=st.integers(0, 2**32 - 1))
def test_the_nth_of_equal_values(size: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    values = generator.integers(0, 3, (3, size)).astype(np.float32)
    wanted = generator.choice(3)
    places = [np.flatnonzero(row == wanted) for row in values]
    nth = [int(generator.integers(0, max(len(of_row), 1))) for of_row in places]
    found = Grid.of(size).find(
        mx.array(values), mx.full((3, 1), float(wanted)), mx.array(nth)[:, None]
    )
    for token, of_row, n in zip(np.array(found), places, nth, strict=True):
        assert token < size  # whatever is asked for
        assert not len(of_row) or token == of_row[n]


@given(size=sizes, count=st.integers(1, 300), seed=st.integers(0, 2**32 - 1))
def test_the_largest_values_and_their_tokens(size: int, count: int, seed: int) -> None:
    values = np.random.default_rng(seed).integers(0, 50, (2, size)).astype(np.float32)
    largest, tokens = Grid.of(size).largest(mx.array(values), count)
    assert np.array_equal(np.take_along_axis(values, np.array(tokens), 1), np.array(largest))
    expected = -np.sort(-values, axis=1)[:, :count]
    assert np.array_equal(-np.sort(-np.array(largest), axis=1), expected)
    assert all(len(np.unique(row)) == min(count, size) for row in np.array(tokens))


def test_powers_of_two_to_the_precision_of_float32() -> None:
    exponents = -np.linspace(0, 125, 100_001, dtype=np.float32)
    expected = np.exp2(exponents.astype(np.float64))
    np.testing.assert_allclose(np.array(exp2(mx.array(exponents))), expected, rtol=2e-7)


def test_what_is_ruled_out_weighs_nothing() -> None:
    exponents = mx.array([0.0, -1.0, -128.0, -1e30, -np.inf])
    assert exp2(exponents).tolist() == [1.0, 0.5, 0.0, 0.0, 0.0]
