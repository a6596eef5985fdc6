"""exp as a softmax needs it, in arithmetic that a CPU compiler vectorizes."""

from functools import partial

import mlx.core as mx
import numpy as np

# Attention: exp of scores that carries NaN on

_HALVINGS = 6
_FITTED_TO = -20.0  # what lies lower is nothing against a softmax's largest
_LOWEST = -87.0  # exp of it is the smallest normal float32


def _fitted() -> list[float]:
    """Coefficients of 1 + x p(x), of degree 4, that is exp(x) where scores are halved so often.

    p is fitted to (exp(x) - 1) / x at Chebyshev's nodes.
    """
    lowest = _FITTED_TO / 2**_HALVINGS
    nodes = lowest / 2 * (1 + np.cos(np.pi * (np.arange(64) + 0.5) / 64))
    return [*np.polyfit(nodes, np.expm1(nodes) / nodes, 3).tolist(), 1.0]


_COEFFICIENTS = _fitted()


@partial(mx.compile, shapeless=True)
def softmax_exp(scores: mx.array) -> mx.array:
    """exp of float32 `scores` that are not positive; below -87 it stays at 1e-36.

    exp(x) = exp(x / 64)^64: a polynomial of degree 4, then six squarings. Absolute error at most
    4e-6, relative 2e-5 where x > -20; exp(0) is 1. On x86 MLX's own exp takes five times as long.
    """
    reduced: mx.array = mx.maximum(scores, _LOWEST) * (1 / 2**_HALVINGS)
    result = _COEFFICIENTS[0] * reduced + _COEFFICIENTS[1]
    for coefficient in _COEFFICIENTS[2:]:
        result = result * reduced + coefficient
    result = mx.contiguous(result)  # see softmax_weights
    for _ in range(_HALVINGS):
        result = result * result
    return result


# Sampling: the weight of each token

LOWEST_SCORE = -60.0
"""A token whose score is lower weighs nothing: no sum with the likeliest's weight of 1 would notice
it. Of a larger weight even 2^-24 is a normal float32, which no device takes for 0."""

_LOG2_E = float(np.log2(np.e))
_BIAS, _MANTISSA_BITS = 127, 23  # of a float32, IEEE 754


def _fitted_bend() -> list[float]:
    """Coefficients of p, of degree 3, with which x + x (1 - x) p(x) is 2^x - 1 for x in [0, 1]."""
    nodes = (1 + np.cos(np.pi * (np.arange(64) + 0.5) / 64)) / 2
    bend = (np.exp2(nodes) - 1 - nodes) / (nodes * (1 - nodes))
    return [float(coefficient) for coefficient in np.polyfit(nodes, bend, 3)]


_BEND = _fitted_bend()


@mx.compile
def softmax_weights(
    logits: mx.array, peaks: mx.array, coldness: mx.array | float, least_score: mx.array | float
) -> mx.array:
    """exp of the scores `(logits - peaks) * coldness`, which are not positive: float32.

    Exactly 0 where the score is NaN or lower than `least_score`, which is LOWEST_SCORE or more;
    exactly 1 where it is 0. Relative error at most 1e-5; a larger score never weighs less.

    The bits of a float32 are an exponent and a mantissa, so that as an integer they rise almost as
    the logarithm of the number does: a polynomial of the fraction makes up for the difference.
    MLX fuses at most 11 operations, and where it stops between a number and a constant, the rest is
    not vectorized: `contiguous` makes it stop at a good place, and copies nothing.
    """
    scores = (logits - peaks) * coldness
    exponent = mx.where(scores >= least_score, scores * _LOG2_E + _BIAS, 0.0)
    exponent = mx.contiguous(exponent)
    x = exponent - exponent.astype(mx.int32).astype(mx.float32)
    square = x * x
    bend = (_BEND[0] * x + _BEND[1]) * square + (_BEND[2] * x + _BEND[3])
    bits = (exponent + bend * (x - square)) * 2**_MANTISSA_BITS
    weights: mx.array = bits.astype(mx.int32).view(mx.float32)
    return weights
