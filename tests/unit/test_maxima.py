"""Maxima by neighbourhood: every search finds what a search through the row finds."""

import math

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.mlx_backend.sampling.maxima import Maxima, strips_of, total_of
from engine.mlx_backend.sampling.sampler import as_list

sizes = st.sampled_from([1, 2, 127, 128, 129, 1280, 5000])
seeds = st.integers(0, 2**32 - 1)


def rows_of(size: int, seed: int) -> npt.NDArray[np.float32]:
    """Many equal values, on both sides of 0, and 0 with both signs."""
    values = np.random.default_rng(seed).integers(-20, 21, (3, size)).astype(np.float32)
    values[0] = np.minimum(values[0], -0.0)
    values[1, size // 2 :] = -np.inf
    values[1, 0] = -7
    return values


@given(size=sizes, seed=seeds)
def test_the_likeliest_is_the_first_of_the_largest(size: int, seed: int) -> None:
    values = rows_of(size, seed)
    maxima = Maxima.of(mx.array(values))
    assert np.array_equal(maxima.likeliest().flatten(), values.argmax(axis=1))
    assert np.array_equal(maxima.peaks.flatten(), values.max(axis=1))


@given(size=sizes, count=st.integers(1, 300), seed=seeds)
def test_the_largest_in_order_of_equals_the_lowest_ids_first(
    size: int, count: int, seed: int
) -> None:
    values = rows_of(size, seed)
    tokens, logits = Maxima.of(mx.array(values)).largest(min(count, size))
    expected = np.argsort(-values, axis=1, kind="stable")[:, :count]
    assert np.array_equal(np.array(tokens)[:, :, 0, 0], expected)
    in_order = np.take_along_axis(values, expected, axis=1)
    assert np.array_equal(np.array(logits)[:, :, 0, 0], in_order)


@pytest.mark.parametrize("value", [math.nan, -math.nan, -math.inf, math.inf])
@pytest.mark.parametrize("size", [1, 100, 300, 640])
def test_the_likeliest_is_in_the_vocabulary_whatever_the_logits(size: int, value: float) -> None:
    maxima = Maxima.of(mx.full((2, size), value, dtype=mx.float32))
    assert maxima.likeliest().flatten().tolist() == [0, 0]


def test_what_is_not_a_number_shows_in_the_peak() -> None:
    values = np.zeros((2, 300), dtype=np.float32)
    values[1, 299] = np.nan
    first, second = np.array(Maxima.of(mx.array(values)).peaks).flatten()
    assert first == 0
    assert np.isnan(second)


def test_the_total_of_strips() -> None:
    strips = strips_of(mx.arange(512, dtype=mx.float32).reshape(2, 256))
    assert strips[0, 3, 0].tolist() == [6, 7]
    assert total_of(strips).flatten().tolist() == [32640, 98176]


@pytest.mark.parametrize("value", [math.nan, -math.nan])
def test_the_largest_are_found_where_there_are_fewer_than_a_block(value: float) -> None:
    tokens, logits = Maxima.of(mx.array([[1.0, value, 2.0]])).largest(3)
    assert set(as_list(tokens.flatten())) <= {0, 1, 2}
    assert len(logits.flatten()) == 3
