"""How the vectors of K and V are stored: as the model computes them, in half precision, or as small
integers.

Each vector is encoded by itself when it is written, and attention reads what is stored. So what is
stored depends neither on how a prompt was cut into chunks nor on what of it was cached, as far as
the model computes the same: forwards of unlike shapes differ in a number's last bits, which may be
rounded to the next code.

Integers are those of MLX's affine quantization: neighbouring numbers of a vector form a group with
one scale and one bias, and a number is `code * scale + bias`. Keys are rotated by a Hadamard
transform first, and so are the queries that meet them, which leaves their products as they are. A
few channels of keys are far larger than the others; without the rotation they would take the
precision of their group (QuaRot, Ashkboos et al. 2024, https://arxiv.org/abs/2404.00456).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

import mlx.core as mx

from engine.mlx_backend.kv.states import ArrayShape
from engine.values.settings import KVFormat

CodeOrder: TypeAlias = Literal["token", "channel"]
"""Which codes of a block lie side by side: those of a token, or those of a channel."""

_GROUPS = (64, 32)
"""Numbers that may share a scale, the preferred size first."""

_SCALE_DTYPE = mx.float16
"""Of scales and biases. In bfloat16 a scale would be rounded by as much as a code."""

_BITS = {KVFormat.Q8: (8, 8), KVFormat.K8V4: (8, 4)}
"""Bits of a number of K and of V. Keys need more: an error in a score changes all weights."""

HALF: Mapping[str, mx.Dtype] = {KVFormat.F16: mx.float16, KVFormat.BF16: mx.bfloat16}
"""The formats of K and V, and of saved states, that are numbers in half precision."""

_ROTATABLE = (1, 12, 20, 28)
"""`mx.hadamard_transform` takes vectors of one of these times a power of two."""


@dataclass(frozen=True, slots=True)
class Codec:
    """How vectors of `dim` numbers of type `dtype` are stored: each as a row of one plane (numbers)
    or of two (codes; the scale and the bias of each group).
    """

    dim: int
    dtype: mx.Dtype
    stored: mx.Dtype  # of numbers, or of scales and biases
    bits: int = 0  # of a code; 0: numbers are stored
    group: int = 0  # numbers that share a scale and a bias
    order: CodeOrder = "token"

    @property
    def planes(self) -> tuple[ArrayShape, ...]:
        """Shape and dtype of a vector's row in each plane."""
        if not self.bits:
            return (ArrayShape((self.dim,), self.stored),)
        codes = ArrayShape((self.dim * self.bits // 8,), mx.uint8)
        return codes, ArrayShape((2 * self.groups,), self.stored)

    @property
    def groups(self) -> int:
        """Groups of a quantized vector."""
        return self.dim // self.group

    @property
    def is_plain(self) -> bool:
        """Whether vectors are stored as the model writes them."""
        return not self.bits and self.stored == self.dtype

    def encode(self, vectors: mx.array) -> list[mx.array]:
        """The rows of `vectors`, `[vectors, dim]`: an array for each plane; codes by token."""
        stored = vectors.astype(self.stored)
        if not self.bits:
            return [stored]
        codes, *scales = mx.quantize(stored, self.group, self.bits)
        return [codes.view(mx.uint8), mx.stack(scales, axis=-1).reshape(len(codes), -1)]

    def decode(self, rows: Sequence[mx.array]) -> mx.array:
        """The vectors, `[..., dim]` of `dtype`, with these rows, `[..., width]` of each plane.
        Codes are by token.
        """
        if not self.bits:
            return rows[0].astype(self.dtype)
        if mx.default_device() != mx.cpu:
            pairs = rows[1].reshape(*rows[1].shape[:-1], -1, 2)
            scales, biases = pairs[..., 0], pairs[..., 1]
            codes = rows[0].view(mx.uint32)
            return mx.dequantize(codes, scales, biases, self.group, self.bits, dtype=self.dtype)
        # Three operations take less than a third of the time of mx.dequantize on a CPU.
        scales, biases = self.scales(rows[1])
        numbers = self.widened(rows[0]).reshape(*scales.shape, self.group)
        numbers = numbers * scales[..., None] + biases[..., None]
        return numbers.reshape(*scales.shape[:-1], self.dim).astype(self.dtype)

    def scales(self, rows: mx.array) -> tuple[mx.array, mx.array]:
        """Scales and biases of vectors, float32 `[..., groups]`, with these rows in their plane.

        They are converted as integers, as Giesen's "half_to_float_fast5" does it: on x86 MLX's own
        conversion takes four times as long.
        """
        low, high = _as_float32_bits(rows.view(mx.uint32))
        return low.view(mx.float32) * _EXPONENTS_APART, high.view(mx.float32) * _EXPONENTS_APART

    def widened(self, codes: mx.array) -> mx.array:
        """Codes as float32, one number each."""
        if self.bits == 4:
            pairs = mx.stack([codes & 15, codes >> 4], axis=-1)
            codes = pairs.reshape(*codes.shape[:-1], -1)
        return codes.astype(mx.float32)

    def __str__(self) -> str:
        """`64float32`, `64float32 as bfloat16`, `64float32 as 8 bits in groups of 32 by token`."""
        written = f"{self.dim}{dtype_name(self.dtype)}"
        if self.bits:
            return f"{written} as {self.bits} bits in groups of {self.group} by {self.order}"
        return written if self.is_plain else f"{written} as {dtype_name(self.stored)}"


_EXPONENTS_APART = 2.0**112
"""A float16 whose bits are those of a float32 is too small by this: their exponents are biased by
15 and 127."""


_NOT_FINITE = 0x7F800000
"""The exponent of a float32 that is infinite or NaN."""


@partial(mx.compile, shapeless=True)
def _as_float32_bits(pairs: mx.array) -> tuple[mx.array, mx.array]:
    """The low and the high float16 of each word, with the bits that a float32 has."""
    low = ((pairs & 0x8000) << 16) | ((pairs & 0x7FFF) << 13)
    high = (pairs & 0x80000000) | ((pairs >> 3) & 0x0FFFE000)
    return (
        mx.where((pairs & 0x7C00) == 0x7C00, low | _NOT_FINITE, low),
        mx.where((pairs & 0x7C000000) == 0x7C000000, high | _NOT_FINITE, high),
    )


def codecs(
    format: KVFormat, kv_heads: int, dims: tuple[int, int], dtypes: tuple[mx.Dtype, mx.Dtype]
) -> tuple[Codec, Codec]:
    """How a layer's K and V are stored in a format; `dims` and `dtypes` are those of a vector of
    each.

    Vectors that no group divides are not quantized, nor are the latents of multi-head latent
    attention (one head whose K and V are unlike), from which all heads are made. Half precision is
    used where it is smaller.

    On a CPU codes of K are stored by channel, because MLX multiplies them in place then: its
    product with rows of codes takes four times as long as that with columns.
    """
    is_latent = kv_heads == 1 and dims[0] != dims[1]
    bits = (0, 0) if is_latent else _BITS.get(format, (0, 0))
    orders: tuple[CodeOrder, CodeOrder] = (
        "channel" if mx.default_device() == mx.cpu else "token",
        "token",
    )
    keys, values = (
        _codec(dim, dtype, n_bits, order, HALF.get(format, dtype))
        for dim, dtype, n_bits, order in zip(dims, dtypes, bits, orders, strict=True)
    )
    return keys, values


def _codec(dim: int, dtype: mx.Dtype, bits: int, order: CodeOrder, half: mx.Dtype) -> Codec:
    group = next((group for group in _GROUPS if dim % group == 0), 0)
    if bits and dim and group:
        return Codec(dim, dtype, _SCALE_DTYPE, bits, group, order)
    return Codec(dim, dtype, half if half.size < dtype.size else dtype)


def is_rotatable(dim: int) -> bool:
    """Whether vectors of `dim` numbers have a Hadamard transform in MLX."""
    powers = (dim // factor for factor in _ROTATABLE if dim % factor == 0)
    return any(power > 0 and power & (power - 1) == 0 for power in powers)


def dtype_name(dtype: mx.Dtype) -> str:
    """`float16` of `mlx.core.float16`."""
    return str(dtype).removeprefix("mlx.core.")
