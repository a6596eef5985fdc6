"""Rotary position embeddings whose tables all layers of a forward share.

`mx.fast.rope` is one kernel on a GPU. On a CPU it is composed of operations, and every layer
computes the cosines and sines of the same positions again, for its queries and for its keys.
"""

import math
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import mlx.core as mx

Tables: TypeAlias = tuple[mx.array, mx.array]
"""Cosines and sines, to be broadcast over `[rows, heads, length, dims / 2]`."""

_original = mx.fast.rope


@contextmanager
def shared_tables() -> Iterator[None]:
    """Meanwhile `mx.fast.rope` computes the tables of equal arguments once.

    Positions are equal where they are the same array, or the same number. For one thread at a time:
    MLX's function is replaced for the process.
    """
    tables = dict[Hashable, tuple[Tables, object]]()

    def rope(
        a: mx.array,
        dims: int,
        *,
        traditional: bool,
        base: float | None = None,
        scale: float = 1.0,
        offset: int | mx.array = 0,
        freqs: mx.array | None = None,
        stream: Any = None,
    ) -> mx.array:
        if a.dtype != mx.float32 or a.ndim != 4:
            return _original(
                a, dims, traditional=traditional, base=base, scale=scale, offset=offset, freqs=freqs
            )
        at = id(offset) if isinstance(offset, mx.array) else offset
        key = at, a.shape[2], dims, base, scale, None if freqs is None else id(freqs)
        if key not in tables:
            positions = mx.arange(a.shape[2], dtype=mx.float32) + _column(offset)
            angles = (positions * scale)[..., None] * _inverse_frequencies(dims, base, freqs)
            tables[key] = (mx.cos(angles), mx.sin(angles)), (offset, freqs)  # they keep their ids
        return _rotated(a, dims, traditional, *tables[key][0])

    mx.fast.rope = rope
    try:
        yield
    finally:
        mx.fast.rope = _original


def _column(offset: int | mx.array) -> mx.array | int:
    """Offsets `[rows]` to be broadcast over `[rows, heads, length]`."""
    if isinstance(offset, mx.array) and offset.ndim == 1:
        return offset[:, None, None]
    return offset


def _inverse_frequencies(dims: int, base: float | None, freqs: mx.array | None) -> mx.array:
    if freqs is not None:
        return mx.reciprocal(freqs)
    assert base is not None, "rope has neither a base nor frequencies"
    half = dims // 2
    return mx.exp(mx.arange(half, dtype=mx.float32) * (-math.log(base) / half))


def _rotated(
    a: mx.array, dims: int, traditional: bool, cosines: mx.array, sines: mx.array
) -> mx.array:
    """The first `dims` dimensions rotated: in pairs of neighbours, or of both halves."""
    half = dims // 2
    if traditional:
        first, second = a[..., 0:dims:2], a[..., 1:dims:2]
    else:
        first, second = a[..., :half], a[..., half:dims]
    turned = [first * cosines - second * sines, first * sines + second * cosines]
    if traditional:
        turned = [mx.stack(turned, axis=-1).reshape(*a.shape[:-1], dims)]
    if dims < a.shape[-1]:
        turned.append(a[..., dims:])
    return turned[0] if len(turned) == 1 else mx.concatenate(turned, axis=-1)
