"""exp2 in arithmetic that a CPU compiler vectorizes."""

import mlx.core as mx

_LOWEST = -127
"""From here on the power is 0: what a float32 with exponent bits of 0 is."""

# Of 2^x for x in [-0.5, 0.5], from the highest power down; Cephes' exp2f.
_COEFFICIENTS = (
    1.535336188319500e-4,
    1.339887440266574e-3,
    9.618437357674640e-3,
    5.550332471162809e-2,
    2.402264791363012e-1,
    6.931472028550421e-1,
    1.0,
)


@mx.compile
def exp2(exponents: mx.array) -> mx.array:
    """2 to the power of float32 `exponents` that are not positive, within 1e-7 of itself.

    Exactly 0 for -inf and below -127, so that what is ruled out weighs nothing. On x86 MLX's own
    functions take several times as long.
    """
    bounded = mx.maximum(exponents, _LOWEST)
    whole = (bounded - 0.5).astype(mx.int32)
    rest = bounded - whole.astype(mx.float32)
    power = mx.array(_COEFFICIENTS[0])
    for coefficient in _COEFFICIENTS[1:]:
        power = power * rest + coefficient
    return power * ((whole + 127) << 23).view(mx.float32)
