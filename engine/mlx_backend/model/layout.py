"""What a model's layers keep, and in which group's storage each of its caches lies."""

from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import mlx.core as mx

from engine.mlx_backend.storage.arena import LayerShape
from engine.mlx_backend.storage.state_arena import StateShape


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """K and V of every token, or of the last `window` ones."""

    shape: LayerShape
    window: int | None = None


@dataclass(frozen=True, slots=True)
class ChunkedCacheSpec:
    """K and V of the tokens since the last multiple of `window`, or of all tokens."""

    shape: LayerShape
    window: int | None


@dataclass(frozen=True, slots=True)
class StateSpec:
    """A recurrent state: a few arrays."""

    arrays: tuple[StateShape, ...]


@dataclass(frozen=True, slots=True)
class UnusedSpec:
    """A cache that the model makes and never writes."""


CacheSpec: TypeAlias = KVCacheSpec | ChunkedCacheSpec | StateSpec | UnusedSpec
SpecTree: TypeAlias = "CacheSpec | tuple[SpecTree, ...]"
"""One cache, or the caches of a layer that keeps several."""


@dataclass(frozen=True)
class Layout:
    """A model's caches, one tree for each that `make_prompt_cache` gives."""

    caches: tuple[SpecTree, ...]
    logits_dtype: mx.Dtype
    vocab_size: int

    @cached_property
    def specs(self) -> tuple[CacheSpec, ...]:
        """All caches, in order."""
        return tuple(spec for cache in self.caches for spec in _leaves(cache))

    @cached_property
    def kv_layers(self) -> tuple[LayerShape, ...]:
        """All layers that keep K and V, with a window or without."""
        return tuple(
            spec.shape for spec in self.specs if isinstance(spec, KVCacheSpec | ChunkedCacheSpec)
        )

    @cached_property
    def dtypes(self) -> tuple[mx.Dtype, ...]:
        """What K and V come in, in order of appearance; what the logits do where there are none."""
        kept = [dtype for shape in self.kv_layers for dtype in (shape.key_dtype, shape.value_dtype)]
        return tuple(dict.fromkeys(kept or [self.logits_dtype]))

    @cached_property
    def full_layers(self) -> tuple[LayerShape, ...]:
        """Layers that keep every token."""
        return self.layers_of(None)

    @cached_property
    def windows(self) -> tuple[int, ...]:
        """The windows there are, in the order of their groups."""
        return tuple(sorted({window for spec in self.specs if (window := _window(spec))}))

    @cached_property
    def states(self) -> tuple[StateShape, ...]:
        """The arrays of a sequence's recurrent state."""
        return tuple(
            array for spec in self.specs if isinstance(spec, StateSpec) for array in spec.arrays
        )

    def layers_of(self, window: int | None) -> tuple[LayerShape, ...]:
        """The layers with that window, or with none."""
        return tuple(
            spec.shape
            for spec in self.specs
            if isinstance(spec, KVCacheSpec | ChunkedCacheSpec) and spec.window == window
        )

    def within(self, max_context_tokens: int) -> "Layout":
        """The same where no sequence is longer: a window that covers it all is none."""
        caches = tuple(_within(cache, max_context_tokens) for cache in self.caches)
        return Layout(caches, self.logits_dtype, self.vocab_size)


def _leaves(tree: SpecTree) -> tuple[CacheSpec, ...]:
    if isinstance(tree, tuple):
        return tuple(leaf for part in tree for leaf in _leaves(part))
    return (tree,)


def _window(spec: CacheSpec) -> int | None:
    return spec.window if isinstance(spec, KVCacheSpec | ChunkedCacheSpec) else None


def _within(tree: SpecTree, max_context_tokens: int) -> SpecTree:
    match tree:
        case tuple():
            return tuple(_within(part, max_context_tokens) for part in tree)
        case KVCacheSpec(shape, int(window)) if window >= max_context_tokens:
            return KVCacheSpec(shape)
        case ChunkedCacheSpec(shape, int(window)) if window >= max_context_tokens:
            return ChunkedCacheSpec(shape, None)
        case _:
            return tree
