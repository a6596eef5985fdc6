"""What each of a model's caches is and what the model writes to it, found by asking the model."""

from collections.abc import Iterable, Iterator
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
from engine.mlx_backend.model.layout import (
    CacheSpec,
    ChunkedCacheSpec,
    KVCacheSpec,
    Layout,
    SpecTree,
    StateSpec,
    UnusedSpec,
)
from engine.mlx_backend.storage.arena import LayerShape
from engine.mlx_backend.storage.state_arena import StateShape

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
    recordings = [cache for cache in _leaves(caches) if isinstance(cache, RecordingCache)]
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


def _leaves(caches: Iterable[Recording]) -> Iterator[RecordingCache | ArraysCache]:
    for cache in caches:
        if isinstance(cache, list):
            yield from _leaves(cache)
        else:
            yield cache


def _spec(cache: Recording, recordings: list[RecordingCache]) -> SpecTree:
    if isinstance(cache, list):
        return tuple(_spec(part, recordings) for part in cache)
    if isinstance(cache, RecordingCache):
        return _kv_spec(cache, recordings)
    if any(array is None for array in cache.cache):
        raise UnsupportedModel("a recurrent layer leaves its cache empty")
    return StateSpec(tuple(StateShape(array.shape[1:], array.dtype) for array in cache.cache))


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
