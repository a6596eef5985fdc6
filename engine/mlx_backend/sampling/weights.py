"""The weights of tokens: exp of scores that are not positive, in arithmetic that CPU compilers
vectorize. NaN has the weight 0. MLX's own exp, which they vectorize as well, takes longer for few
rows.
"""

import mlx.core as mx
import numpy as np

LOWEST_SCORE = -60.0
"""A token with a lower score has the weight 0: it would not change a sum with the likeliest token's
weight of 1. Of a larger weight even 2^-24 is a normal float32, which no device flushes to 0."""

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
    """exp of the scores `(logits - peaks) * coldness`, which are not positive, in float32.

    The weight is exactly 0 where the score is NaN or lower than `least_score`, which is at least
    LOWEST_SCORE, and exactly 1 where the score is 0. The relative error is at most 1e-5, and a
    larger score never has a smaller weight.

    The bits of a float32 are an exponent and a mantissa. Read as an integer they rise almost like
    the logarithm of the number, and a polynomial of the fraction corrects the difference. MLX fuses
    at most 11 operations; where a fusion ends between a number and a constant, the operations after
    it are not vectorized. `contiguous` ends it at a good place, and copies nothing.
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
