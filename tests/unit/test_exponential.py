"""The exponential of scores against numpy's."""

import mlx.core as mx
import numpy as np

from engine.mlx_backend.exponential import softmax_exp


def test_softmax_exp_is_exp_where_a_softmax_looks() -> None:
    scores = np.linspace(-100, 0, 20_001, dtype=np.float32)
    found = np.array(softmax_exp(mx.array(scores)), dtype=np.float64)
    exact = np.exp(scores.astype(np.float64))
    assert np.abs(found - exact).max() < 4e-6
    near = scores > -20
    assert (np.abs(found - exact) / exact)[near].max() < 2e-5


def test_softmax_exp_of_what_is_hidden_is_nothing() -> None:
    assert 0 <= float(softmax_exp(mx.array([-1e30]))[0]) < 1e-30
    assert float(softmax_exp(mx.array([0.0]))[0]) == 1.0
