"""How the vectors of K and V are stored: as the model computes them, in half precision, or as small
integers.

Each vector is encoded by itself when it is written, and attention reads what is stored. So what is
stored depends neither on how a prompt was cut into chunks nor on what of it was cached, as far as
the model computes the same: forwards of unlike shapes differ in a number's last bits, which may be
rounded to the next code.

Neighbouring numbers of a vector form a group with one scale, and a number is an integer times the
scale. Keys are rotated by a Hadamard transform first, and so are the
queries that meet them, which leaves their products as they are. A few channels of keys are far
larger than the others; without the rotation they would take the precision of their group (QuaRot,
Ashkboos et al. 2024, https://arxiv.org/abs/2404.00456).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import mlx.core as mx

from engine.mlx_backend.kv.states import ArrayShape
from engine.values.settings import KVFormat

_GROUPS = (64, 32)
"""Numbers that may share a scale, the preferred size first."""

_BITS = {KVFormat.Q8: (8, 8), KVFormat.K8V4: (8, 4)}
"""Bits of a number of K and of V. Keys need more: an error in a score changes all weights."""

HALF: Mapping[str, mx.Dtype] = {KVFormat.F16: mx.float16, KVFormat.BF16: mx.bfloat16}
"""The formats of K and V, and of saved states, that are numbers in half precision."""

_ROTATABLE = (1, 12, 20, 28)
"""`mx.hadamard_transform` takes vectors of one of these times a power of two."""


@dataclass(frozen=True, slots=True)
class Codec:
    """How vectors of `dim` numbers of type `dtype` are stored: each as a row of one plane (numbers)
    or of two (codes, which are integers plus `zero`; the scale of each group).
    """

    dim: int
    dtype: mx.Dtype
    stored: mx.Dtype  # of numbers, or of scales
    bits: int = 0  # of a code; 0: numbers are stored
    group: int = 0  # numbers that share a scale

    @property
    def planes(self) -> tuple[ArrayShape, ...]:
        """Shape and dtype of a vector's row in each plane."""
        if not self.bits:
            return (ArrayShape((self.dim,), self.stored),)
        codes = ArrayShape((self.dim * self.bits // 8,), mx.uint8)
        return codes, ArrayShape((self.groups,), self.stored)

    @property
    def groups(self) -> int:
        """Groups of a quantized vector."""
        return self.dim // self.group

    @property
    def zero(self) -> int:
        """The code of zero."""
        return 1 << (self.bits - 1)

    @property
    def is_plain(self) -> bool:
        """Whether vectors are stored as the model writes them."""
        return not self.bits and self.stored == self.dtype

    def encode(self, vectors: mx.array) -> list[mx.array]:
        """The rows of `vectors`, `[vectors, dim]`: an array for each plane; codes by token."""
        stored = vectors.astype(self.stored)
        if not self.bits:
            return [stored]
        groups = stored.reshape(-1, self.groups, self.group)
        scales = self._scales(groups)
        numbers = mx.round(groups / mx.where(scales == 0, 1, scales)) + self.zero
        codes = mx.minimum(numbers, 2 * self.zero - 1).astype(mx.uint8).reshape(len(stored), -1)
        if self.bits == 4:
            codes = codes[:, ::2] | codes[:, 1::2] << 4
        return [codes, scales.reshape(len(stored), -1)]

    def _scales(self, groups: mx.array) -> mx.array:
        """The scale of each group, `[..., group]`: the number farthest from zero is kept exactly.

        There is one integer more below zero than above. With 4 bits that number becomes the lowest
        integer, as in llama.cpp's type Q4_0, for steps that are an eighth smaller. With 8 bits, as
        in Q8_0, it becomes 127 or -127: its sign does not matter, so no other number is cut off.
        """
        if self.bits == 4:
            highest, lowest = groups.max(axis=-1, keepdims=True), groups.min(axis=-1, keepdims=True)
            return mx.where(highest > -lowest, highest, lowest) / -self.zero
        return mx.abs(groups).max(axis=-1, keepdims=True) / (self.zero - 1)

    def decode(self, rows: Sequence[mx.array]) -> mx.array:
        """The vectors, `[..., dim]` of `dtype`, with these rows, `[..., width]` of each plane.
        Codes are by token.
        """
        if not self.bits:
            return rows[0].astype(self.dtype)
        # MLX's kernels fuse it on a GPU; on a CPU their broadcasts are slow.
        decoded = self._decoded if mx.default_device() == mx.cpu else _fused(self)
        codes, scales = rows
        numbers = decoded(codes.reshape(*scales.shape, -1), scales[..., None])
        return numbers.reshape(*scales.shape[:-1], self.dim)

    def _decoded(self, codes: mx.array, scales: mx.array) -> mx.array:
        return (self.integers(codes) * scales).astype(self.dtype)

    def integers(self, codes: mx.array) -> mx.array:
        """The integers of codes, as float32."""
        if self.bits == 4:
            codes = mx.stack([codes & 15, codes >> 4], axis=-1).flatten(-2)
        return codes.astype(mx.float32) - self.zero

    def __str__(self) -> str:
        """`64float32`, `64float32 as bfloat16`, `64float32 as 8 bits with a scale for 32`."""
        written = f"{self.dim}{dtype_name(self.dtype)}"
        if self.bits:
            return f"{written} as {self.bits} bits with a scale for {self.group}"
        return written if self.is_plain else f"{written} as {dtype_name(self.stored)}"


@cache
def _fused(codec: Codec) -> Callable[[mx.array, mx.array], mx.array]:
    return mx.compile(codec._decoded, shapeless=True)


def codecs(
    format: KVFormat, kv_heads: int, dims: tuple[int, int], dtypes: tuple[mx.Dtype, mx.Dtype]
) -> tuple[Codec, Codec]:
    """How a layer's K and V are stored in a format; `dims` and `dtypes` are those of a vector of
    each.

    Vectors that no group divides are not quantized, nor are the latents of multi-head latent
    attention (one head whose K and V are unlike), from which all heads are made. Half precision is
    used where it is smaller.
    """
    bits = (0, 0) if is_latent(kv_heads, dims) else _BITS.get(format, (0, 0))
    keys, values = (
        _codec(dim, dtype, n_bits, HALF.get(format, dtype))
        for dim, dtype, n_bits in zip(dims, dtypes, bits, strict=True)
    )
    return keys, values


def is_latent(kv_heads: int, dims: tuple[int, int]) -> bool:
    """Whether a layer with K and V of these dimensions keeps one latent vector for all heads."""
    return kv_heads == 1 and dims[0] != dims[1]


def _codec(dim: int, dtype: mx.Dtype, bits: int, half: mx.Dtype) -> Codec:
    group = next((group for group in _GROUPS if dim % group == 0), 0)
    if bits and dim and group:
        return Codec(dim, dtype, mx.float32, bits, group)
    return Codec(dim, dtype, half if half.size < dtype.size else dtype)


def is_rotatable(dim: int) -> bool:
    """Whether vectors of `dim` numbers have a Hadamard transform in MLX."""
    powers = (dim // factor for factor in _ROTATABLE if dim % factor == 0)
    return any(power > 0 and power & (power - 1) == 0 for power in powers)


def dtype_name(dtype: mx.Dtype) -> str:
    """`float16` of `mlx.core.float16`."""
    return str(dtype).removeprefix("mlx.core.")
