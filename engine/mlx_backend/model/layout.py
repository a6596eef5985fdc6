"""What a model's layers keep, found by asking the model, and where each of its caches lies."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from engine.mlx_backend.errors import UnsupportedModel
from engine.mlx_backend.kv.arena import LayerShape
from engine.mlx_backend.kv.states import ArrayShape


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

    arrays: tuple[ArrayShape, ...]


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
    def states(self) -> tuple[ArrayShape, ...]:
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


DISCOVERY_TOKENS = 8
"""Enough that states which grow with the first few tokens have their full size."""

RUN_ERRORS = (AttributeError, IndexError, RuntimeError, TypeError, ValueError)
"""What mlx-lm's modules raise when a cache or the device is not what they expect."""


class RecordingCache:
    """Stands in for a KV cache of any kind in a forward that is never evaluated."""

    start_position = 0

    def __init__(self, cache: KVCache | RotatingKVCache | ChunkedKVCache) -> None:
        self.offset = 0
        self.kind = type(cache)
        self.own_window = _own_window(cache)
        self.asked_window = 0
        self.written: tuple[mx.array, mx.array] | None = None
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.written = keys, values
        self.keys, self.values = keys, values
        return self.written

    def keys_and_values(self) -> tuple[mx.array, mx.array] | None:
        return self.written

    def maybe_trim_front(self) -> None:
        """Nothing has been cached yet."""

    def make_mask(
        self, length: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str:
        self.asked_window = max(self.asked_window, window_size or 0)
        mask: mx.array = create_causal_mask(length, window_size=window_size)
        return mask if return_array or window_size else "causal"


Recording: TypeAlias = "RecordingCache | ArraysCache | list[Recording]"


def discover(model: Module) -> Layout:
    """Each cache's kind, shapes and dtypes; dtype and width (vocabulary) of the logits.

    Runs one lazy forward of a few tokens through recording caches. Raises UnsupportedModel when
    the model does not run so, or keeps a cache of a kind unknown here.
    """
    caches = [_recording(index, cache) for index, cache in enumerate(make_prompt_cache(model))]
    try:
        logits: mx.array = model(mx.zeros((1, DISCOVERY_TOKENS), mx.int32), cache=caches)
    except RUN_ERRORS as error:
        raise UnsupportedModel(f"the model does not run through cache views: {error}") from error
    recordings = [cache for cache in _recordings(caches) if isinstance(cache, RecordingCache)]
    specs = tuple(_spec(cache, recordings) for cache in caches)
    return Layout(specs, logits.dtype, logits.shape[-1])


def _recording(index: int, cache: object) -> Recording:
    if isinstance(cache, CacheList):
        return [_recording(index, part) for part in cache.caches]
    if type(cache) in (KVCache, RotatingKVCache, ChunkedKVCache):
        return RecordingCache(cache)
    if type(cache) is ArraysCache:
        return cache
    raise UnsupportedModel(
        f"layer {index} keeps a {type(cache).__name__}, a cache of its own kind; served are full "
        "attention, sliding windows, chunks and recurrent states"
    )


def _own_window(cache: KVCache | RotatingKVCache | ChunkedKVCache) -> int | None:
    if isinstance(cache, RotatingKVCache):
        if cache.keep:
            raise UnsupportedModel(f"a sliding window that keeps its first {cache.keep} tokens")
        return int(cache.max_size)
    return int(cache.chunk_size) if isinstance(cache, ChunkedKVCache) else None


def _recordings(caches: Iterable[Recording]) -> Iterator[RecordingCache | ArraysCache]:
    for cache in caches:
        if isinstance(cache, list):
            yield from _recordings(cache)
        else:
            yield cache


def _spec(cache: Recording, recordings: list[RecordingCache]) -> SpecTree:
    if isinstance(cache, list):
        return tuple(_spec(part, recordings) for part in cache)
    if isinstance(cache, RecordingCache):
        return _kv_spec(cache, recordings)
    if any(array is None for array in cache.cache):
        raise UnsupportedModel("a recurrent layer leaves its cache empty")
    return StateSpec(tuple(ArrayShape(array.shape[1:], array.dtype) for array in cache.cache))


def _kv_spec(cache: RecordingCache, recordings: list[RecordingCache]) -> CacheSpec:
    if cache.written is None:
        return UnusedSpec()
    keys, values = cache.written
    shape = LayerShape(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype, values.dtype)
    if cache.own_window is None:
        return KVCacheSpec(shape)
    if cache.kind is ChunkedKVCache:
        return ChunkedCacheSpec(shape, cache.own_window)
    # One layer of each kind is asked for the mask of all, and some ask for more than they keep.
    asked = [other.asked_window for other in recordings if other.own_window == cache.own_window]
    return KVCacheSpec(shape, max(cache.own_window, *asked))
