"""Kinds of layers: what decides which attention is the fastest for a layer on a device."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import mlx.core as mx
from mlx.nn.layers.base import Module

from engine.mlx_backend.kv.formats import dtype_name, is_latent
from engine.mlx_backend.kv.layout import ChunkedCacheSpec, KVCacheSpec, Layout
from engine.mlx_backend.kv.shape import LayerShape
from engine.values.settings import KVFormat

LONGEST_KEYS = 1 << 15
"""The most keys of a row that are compared."""


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Layers that are equal in all that attention depends on. `longest`: the most keys of a row
    that are compared.
    """

    kv_heads: int
    query_heads: int
    key_dim: int
    value_dim: int
    key_dtype: str
    value_dtype: str
    format: KVFormat
    block_size: int
    window: int | None
    has_sinks: bool
    longest: int

    @property
    def shape(self) -> LayerShape:
        """What a layer keeps of each token."""
        key_dtype, value_dtype = (getattr(mx, name) for name in (self.key_dtype, self.value_dtype))
        return LayerShape(
            self.kv_heads, self.key_dim, self.value_dim, key_dtype, value_dtype, self.format
        )

    def __str__(self) -> str:
        """`32 heads over 8 KV heads of 128, bfloat16 as q8, window 1,024, blocks of 32`."""
        dims = f"{self.key_dim}"
        if self.value_dim != self.key_dim:
            dims += f" and {self.value_dim}"
        stored = "" if all(codec.is_plain for codec in self.shape.codecs) else f" as {self.format}"
        window = "" if self.window is None else f", window {self.window:,}"
        sinks = ", sinks" if self.has_sinks else ""
        return (
            f"{self.query_heads} heads over {self.kv_heads} KV heads of {dims}, {self.key_dtype}"
            f"{stored}{window}{sinks}, blocks of {self.block_size}"
        )


Kinds: TypeAlias = Mapping[int | None, Counter[LayerKind]]
"""The kinds of a model's layers and the number of layers of each, by window."""


def kinds_of(
    model: Module, layout: Layout, query_heads: int, block_size: int, most_tokens: int
) -> Kinds:
    """The kinds of a model's layers and the number of layers of each, by window. Layers whose
    attention cannot read blocks are left out: those with chunks, those with one latent vector for
    all heads, and those that the model's own attention reads. `most_tokens`: of one sequence.
    """
    has_sinks = any("sinks" in module for _, module in model.named_modules())
    found = dict[int | None, Counter[LayerKind]]()
    for spec in layout.specs:
        if not isinstance(spec, KVCacheSpec) or isinstance(spec, ChunkedCacheSpec):
            continue
        shape = spec.shape
        if shape.is_fixed or is_latent(shape.kv_heads, (shape.key_dim, shape.value_dim)):
            continue
        kind = LayerKind(
            kv_heads=shape.kv_heads,
            query_heads=-(-query_heads // shape.kv_heads) * shape.kv_heads,
            key_dim=shape.key_dim,
            value_dim=shape.value_dim,
            key_dtype=dtype_name(shape.key_dtype),
            value_dtype=dtype_name(shape.value_dtype),
            format=shape.format,
            block_size=block_size,
            window=spec.window,
            has_sinks=has_sinks,
            longest=min(LONGEST_KEYS, most_tokens, spec.window or LONGEST_KEYS),
        )
        found.setdefault(spec.window, Counter())[_as_stored(kind)] += 1
    return found


def _as_stored(kind: LayerKind) -> LayerKind:
    """The kind in the format that it is stored in: where nothing can be smaller, it is full."""
    plain = all(codec.is_plain for codec in kind.shape.codecs)
    return replace(kind, format=KVFormat.FULL) if plain else kind
