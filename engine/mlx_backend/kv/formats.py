"""How the vectors of K and V are stored: as the model computes them, in half precision, or as small
integers.

Each vector is encoded by itself when it is written, and attention reads what is stored. So a text
depends neither on how its prompt was cut into chunks nor on what of it was cached.

Integers are those of MLX's affine quantization: neighbouring numbers of a vector form a group with
one scale and one bias, and a number is `code * scale + bias`. Keys are rotated by a Hadamard
transform first, and so are the queries that meet them, which leaves their products as they are. A
few channels of keys are far larger than the others; without the rotation they would take the
precision of their group (QuaRot, Ashkboos et al. 2024, https://arxiv.org/abs/2404.00456).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from engine.mlx_backend.kv.states import ArrayShape
from engine.values.settings import KVFormat

_GROUPS = (64, 32)
"""Numbers that may share a scale, the preferred size first."""

_SCALE_DTYPE = mx.float16
"""Of scales and biases. In bfloat16 a scale would be rounded by as much as a code."""

_BITS = {KVFormat.Q8: (8, 8), KVFormat.K8V4: (8, 4)}
"""Bits of a number of K and of V. Keys need more: an error in a score changes all weights."""

_HALF = {KVFormat.F16: mx.float16, KVFormat.BF16: mx.bfloat16}

_ROTATABLE = (1, 12, 20, 28)
"""`mx.hadamard_transform` takes vectors of one of these times a power of two."""


@dataclass(frozen=True, slots=True)
class Codec:
    """How vectors of `dim` numbers of type `dtype` are stored: each as a row of one plane (numbers)
    or of three (codes, scales, biases).
    """

    dim: int
    dtype: mx.Dtype
    stored: mx.Dtype  # of numbers, or of scales and biases
    bits: int = 0  # of a code; 0: numbers are stored
    group: int = 0  # numbers that share a scale and a bias

    @property
    def planes(self) -> tuple[ArrayShape, ...]:
        """Shape and dtype of a vector's row in each plane."""
        if not self.bits:
            return (ArrayShape((self.dim,), self.stored),)
        scales = ArrayShape((self.dim // self.group,), self.stored)
        return ArrayShape((self.dim * self.bits // 32,), mx.uint32), scales, scales

    @property
    def is_plain(self) -> bool:
        """Whether vectors are stored as the model writes them."""
        return not self.bits and self.stored == self.dtype

    def encode(self, vectors: mx.array) -> list[mx.array]:
        """The rows of `vectors`, `[vectors, dim]`: an array for each plane."""
        stored = vectors.astype(self.stored)
        return list(mx.quantize(stored, self.group, self.bits)) if self.bits else [stored]

    def decode(self, rows: Sequence[mx.array]) -> mx.array:
        """The vectors, `[..., dim]` of `dtype`, with these rows, `[..., width]` of each plane."""
        if not self.bits:
            return rows[0].astype(self.dtype)
        codes, scales, biases = rows
        if mx.default_device() != mx.cpu:
            return mx.dequantize(codes, scales, biases, self.group, self.bits, dtype=self.dtype)
        # Three operations take less than a third of the time of mx.dequantize on a CPU.
        numbers = self.codes(codes).reshape(*scales.shape, self.group)
        numbers = numbers * scales[..., None].astype(mx.float32)
        numbers = numbers + biases[..., None].astype(mx.float32)
        return numbers.reshape(*scales.shape[:-1], self.dim).astype(self.dtype)

    def codes(self, packed: mx.array) -> mx.array:
        """The codes of vectors, float32 `[..., dim]`, from their rows in the plane of codes."""
        codes = packed.view(mx.uint8)
        if self.bits == 4:
            codes = mx.stack([codes & 15, codes >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
        return codes.astype(mx.float32)

    def __str__(self) -> str:
        """`128float16`, `64float32 as bfloat16`, or `128float16 as 8 bits by 64`."""
        written = f"{self.dim}{dtype_name(self.dtype)}"
        if self.bits:
            return f"{written} as {self.bits} bits by {self.group}"
        return written if self.is_plain else f"{written} as {dtype_name(self.stored)}"


def codecs(
    format: KVFormat, kv_heads: int, dims: tuple[int, int], dtypes: tuple[mx.Dtype, mx.Dtype]
) -> tuple[Codec, Codec]:
    """How a layer's K and V are stored in a format; `dims` and `dtypes` are those of a vector of
    each.

    Vectors that no group divides are not quantized, nor are the latents of multi-head latent
    attention (one head whose K and V are unlike), from which all heads are made. Half precision is
    used where it is smaller.
    """
    is_latent = kv_heads == 1 and dims[0] != dims[1]
    bits = (0, 0) if is_latent else _BITS.get(format, (0, 0))
    keys, values = (
        _codec(dim, dtype, n_bits, _HALF.get(format, dtype))
        for dim, dtype, n_bits in zip(dims, dtypes, bits, strict=True)
    )
    return keys, values


def _codec(dim: int, dtype: mx.Dtype, bits: int, half: mx.Dtype) -> Codec:
    group = next((group for group in _GROUPS if dim % group == 0), 0)
    if bits and dim and group:
        return Codec(dim, dtype, _SCALE_DTYPE, bits, group)
    return Codec(dim, dtype, half if half.size < dtype.size else dtype)


def is_rotatable(dim: int) -> bool:
    """Whether vectors of `dim` numbers have a Hadamard transform in MLX."""
    powers = (dim // factor for factor in _ROTATABLE if dim % factor == 0)
    return any(power > 0 and power & (power - 1) == 0 for power in powers)


def dtype_name(dtype: mx.Dtype) -> str:
    """`float16` of `mlx.core.float16`."""
    return str(dtype).removeprefix("mlx.core.")
