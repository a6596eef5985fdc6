"""GELU in arithmetic that compilers of CPUs vectorize.

MLX's own erf calls a function for each number there: for 774,000 numbers it took 38 ms, this GELU 3
(two cores of an Intel Xeon, float32). MLX fuses at most 11 operations; where
a fusion ends between a number and a constant, the operations after it are not vectorized, so
`contiguous`, which copies nothing, ends each at a good place.
"""

from functools import partial

import mlx.core as mx

_ERF_OVER = (
    *(-2.72614225801306e-10, 2.77068142495902e-08, -2.10102402082508e-06),
    *(-5.69250639462346e-05, -7.34990630326855e-04, -2.95459980854025e-03),
    -1.60960333262415e-02,
)
_ERF_UNDER = (
    *(-1.45660718464996e-05, -2.13374055278905e-04, -1.68282697438203e-03),
    *(-7.37332916720468e-03, -1.42647390514189e-02),
)
"""Coefficients in x^2 of Eigen's erf for float32: x * over / under, for x within 4 of 0, beyond
which erf is 1 in float32.
"""


@partial(mx.compile, shapeless=True)
def gelu(x: mx.array) -> mx.array:
    """x * (1 + erf(x / sqrt(2))) / 2, with an absolute error of erf below 1e-6."""
    wide = x.astype(mx.float32)
    scaled = mx.contiguous(mx.minimum(mx.maximum(wide * 0.5**0.5, -4.0), 4.0))
    square = mx.contiguous(scaled * scaled)
    over = square * _ERF_OVER[0] + _ERF_OVER[1]
    for coefficient in _ERF_OVER[2:5]:
        over = over * square + coefficient
    over = mx.contiguous(over)
    for coefficient in _ERF_OVER[5:]:
        over = over * square + coefficient
    over = mx.contiguous(over * scaled)
    under = square * _ERF_UNDER[0] + _ERF_UNDER[1]
    for coefficient in _ERF_UNDER[2:]:
        under = under * square + coefficient
    half = mx.contiguous(wide * 0.5)
    found: mx.array = (half + half * (over / mx.contiguous(under))).astype(x.dtype)
    return found
