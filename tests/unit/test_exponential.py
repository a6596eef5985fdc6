"""The exponentials of scores against numpy's."""

import math

import mlx.core as mx
import numpy as np
import pytest

from engine.mlx_backend.model.attention import softmax_exp
from engine.mlx_backend.sampling.sampler import as_list
from engine.mlx_backend.sampling.weights import LOWEST_SCORE, softmax_weights


def test_softmax_exp_is_exp_where_a_softmax_looks() -> None:
    scores = np.linspace(-100, 0, 20_001, dtype=np.float32)
    found = np.array(softmax_exp(mx.array(scores)), dtype=np.float64)
    exact = np.exp(scores.astype(np.float64))
    within = scores > -87
    assert (np.abs(found - exact) / exact)[within].max() < 1e-5
    assert found[~within].max() < 2e-38


def test_softmax_exp_of_what_is_hidden_is_nothing() -> None:
    assert 0 <= float(softmax_exp(mx.array([-1e30]))[0]) < 1e-30
    assert float(softmax_exp(mx.array([0.0]))[0]) == 1.0


def test_softmax_exp_passes_on_what_is_not_a_number() -> None:
    assert math.isnan(float(softmax_exp(mx.array([math.nan]))[0]))


def weights_of(scores: list[float], least_score: float = LOWEST_SCORE) -> list[float]:
    logits = mx.array([scores], dtype=mx.float32)
    return as_list(softmax_weights(logits, mx.array([[0.0]]), 1.0, least_score)[0])


@pytest.mark.parametrize("rows", [1, 3])
def test_weights_are_exp_at_the_temperature_of_each_row(rows: int) -> None:
    temperatures = np.array([[1.0], [0.25], [3.0]])[:rows]
    peaks = np.array([[0.0], [7.0], [-4.0]])[:rows]
    scores = np.linspace(-59.9, 0, 40_001)
    logits = (scores * temperatures + peaks).astype(np.float32)
    coldness = (1 / temperatures).astype(np.float32)
    found = softmax_weights(
        mx.array(logits), mx.array(peaks.astype(np.float32)), mx.array(coldness), LOWEST_SCORE
    )
    exact = np.exp((logits.astype(np.float64) - peaks) * coldness)
    error = np.abs(np.array(found, dtype=np.float64) - exact) / exact
    assert error.max() < 2e-5  # of which the rounding of a score of -60 is 8e-6
    assert error[:, scores > -20].max() < 1e-5


def test_a_larger_score_never_weighs_less() -> None:
    scores = np.linspace(-1, 0, 2**20, dtype=np.float32)
    assert np.all(np.diff(weights_of(scores.tolist())) >= 0)


def test_the_largest_weighs_one_and_what_is_ruled_out_nothing() -> None:
    below = np.nextafter(np.float32(LOWEST_SCORE), np.float32(-100))
    scores = [0.0, -math.inf, math.nan, -1e30, float(below)]
    assert weights_of(scores) == [1, 0, 0, 0, 0]
    assert weights_of([LOWEST_SCORE])[0] > 0


def test_scores_under_the_least_weigh_nothing() -> None:
    weights = weights_of([0.0, -0.5, -1.0, -1.5], least_score=-1.0)
    assert weights == pytest.approx([1, math.exp(-0.5), math.exp(-1), 0], rel=1e-5)
    assert weights[3] == 0
