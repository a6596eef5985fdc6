"""What a model's layers keep, found by running the model, and the layout of its caches."""

import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from engine.api import ModelError
from engine.mlx_backend.host import device_name
from engine.mlx_backend.kv.formats import HALF
from engine.mlx_backend.kv.shape import LayerShape
from engine.mlx_backend.kv.states import ArrayShape, StateBytes, state_bytes
from engine.values.settings import KVFormat, StateFormat


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """K and V of every token, or of the last `window` ones."""

    shape: LayerShape
    window: int | None = None


@dataclass(frozen=True, slots=True)
class ChunkedCacheSpec(KVCacheSpec):
    """K and V of the tokens since the last multiple of `window`, or of all tokens."""


@dataclass(frozen=True, slots=True)
class StateSpec:
    """The arrays of a recurrent state, and how each is saved."""

    arrays: tuple[ArrayShape, ...]
    saved: tuple[ArrayShape, ...]


@dataclass(frozen=True, slots=True)
class UnusedSpec:
    """A cache that the model makes and never writes."""


CacheSpec: TypeAlias = KVCacheSpec | StateSpec | UnusedSpec
SpecTree: TypeAlias = "CacheSpec | tuple[SpecTree, ...]"
"""One cache, or the caches of a layer that keeps several."""


@dataclass(frozen=True)
class Layout:
    """A model's caches, one tree for each that `make_prompt_cache` returns."""

    caches: tuple[SpecTree, ...]
    logits_dtype: mx.Dtype
    vocab_size: int

    @cached_property
    def specs(self) -> tuple[CacheSpec, ...]:
        """All caches, in order."""
        return tuple(_leaves(self.caches))

    @cached_property
    def _kv_specs(self) -> tuple[KVCacheSpec, ...]:
        return tuple(spec for spec in self.specs if isinstance(spec, KVCacheSpec))

    @cached_property
    def kv_layers(self) -> tuple[LayerShape, ...]:
        """All layers that keep K and V, with a window or without."""
        return tuple(spec.shape for spec in self._kv_specs)

    @cached_property
    def dtypes(self) -> tuple[mx.Dtype, ...]:
        """The dtypes of K and V, in order of appearance; without K and V, that of the logits."""
        kept = [dtype for shape in self.kv_layers for _, dtype in shape.vectors]
        return tuple(dict.fromkeys(kept or [self.logits_dtype]))

    @cached_property
    def full_layers(self) -> tuple[LayerShape, ...]:
        """Layers that keep every token."""
        return self.layers_of(None)

    @cached_property
    def windows(self) -> tuple[int, ...]:
        """The layers' windows, in the order of their groups."""
        return tuple(sorted({spec.window for spec in self._kv_specs if spec.window}))

    @cached_property
    def states(self) -> tuple[ArrayShape, ...]:
        """The arrays of a sequence's recurrent state."""
        return tuple(array for spec in self._state_specs for array in spec.arrays)

    @cached_property
    def saved_states(self) -> tuple[ArrayShape, ...]:
        """The arrays of a sequence's recurrent state, as they are saved."""
        return tuple(array for spec in self._state_specs for array in spec.saved)

    @property
    def rounds_states(self) -> bool:
        """Whether states are saved in less precision than the model computes them in."""
        return self.saved_states != self.states

    @property
    def state_bytes(self) -> StateBytes | None:
        """Bytes of a sequence's recurrent state; None without one."""
        if not self.states:
            return None
        largest = max(state_bytes(spec.arrays) for spec in self._state_specs)
        return StateBytes(state_bytes(self.states), state_bytes(self.saved_states), largest)

    @cached_property
    def _state_specs(self) -> tuple[StateSpec, ...]:
        return tuple(spec for spec in self.specs if isinstance(spec, StateSpec))

    def layers_of(self, window: int | None) -> tuple[LayerShape, ...]:
        """The layers with that window, or with none."""
        return tuple(spec.shape for spec in self._kv_specs if spec.window == window)

    @property
    def format(self) -> KVFormat:
        """How K and V are stored, as far as they can be."""
        return self.kv_layers[0].format if self.kv_layers else KVFormat.FULL

    @property
    def is_stored_in_full(self) -> bool:
        """Whether all of K and V is stored as the model computes it."""
        return all(codec.is_plain for shape in self.kv_layers for codec in shape.codecs)

    @property
    def format_in_use(self) -> str:
        """How K and V are stored: `full`, `q8`, or `q8 (2 of 24 layers full)`, where those cannot
        be stored so.
        """
        if self.is_stored_in_full:
            return str(KVFormat.FULL)
        layers = self.kv_layers
        full = [shape for shape in layers if all(codec.is_plain for codec in shape.codecs)]
        partly = f" ({len(full)} of {len(layers)} layers full)" if full else ""
        return f"{self.format}{partly}"

    @property
    def state_format(self) -> StateFormat:
        """How states are saved: full where another format would not be smaller."""
        smaller = {
            saved.dtype
            for own, saved in zip(self.states, self.saved_states, strict=True)
            if saved != own
        }
        names = (name for name, dtype in HALF.items() if dtype in smaller)
        return StateFormat(next(names, StateFormat.FULL))

    def stored_as(self, kv: KVFormat, states: StateFormat = StateFormat.FULL) -> "Layout":
        """The layout with K and V, and saved states, in these formats, where they can be stored
        so.
        """
        half = HALF.get(states)

        def stored_as(spec: CacheSpec) -> CacheSpec:
            match spec:
                case KVCacheSpec(shape=shape):
                    return replace(spec, shape=replace(shape, format=kv))
                case StateSpec(arrays=arrays):
                    return replace(spec, saved=tuple(_smaller(array, half) for array in arrays))
                case _:
                    return spec

        return replace(self, caches=tree_map(stored_as, self.caches))

    def within(self, max_context_tokens: int) -> "Layout":
        """The layout where no sequence is longer: a window that covers it all is dropped."""

        def within(spec: CacheSpec) -> CacheSpec:
            match spec:
                case KVCacheSpec(window=int(window)) if window >= max_context_tokens:
                    return replace(spec, window=None)
                case _:
                    return spec

        return replace(self, caches=tree_map(within, self.caches))


def _smaller(array: ArrayShape, half: mx.Dtype | None) -> ArrayShape:
    """The array in half precision, if it is of numbers that are larger."""
    is_real = mx.issubdtype(array.dtype, mx.floating)
    return replace(array, dtype=half) if half and is_real and array.dtype.size > 2 else array


def _leaves(tree: object) -> list[Any]:
    return list(dict(tree_flatten(tree)).values())


DISCOVERY_TOKENS = 8
"""Enough that states which grow with the first few tokens have their full size."""

RUN_ERRORS = (AttributeError, IndexError, RuntimeError, TypeError, ValueError)
"""What mlx-lm's modules raise when a cache or the device is not what they expect."""

_KERNEL = re.compile(r"^\[(metal|cuda)_kernel\]")
"""The beginning of what MLX raises where it has no backend for a kernel."""


def run_problem(error: BaseException) -> str:
    """One of RUN_ERRORS in words."""
    if _KERNEL.search(str(error)):
        return f"mlx-lm has a kernel for it that {device_name()} cannot run ({error})"
    return str(error)


class RecordingCache:
    """Stands in for a KV cache of any kind in a forward that is never evaluated.

    `window` is the cache's own, and `asked_window` the largest that a mask was made for.
    """

    start_position = 0

    def __init__(self, cache: KVCache | RotatingKVCache | ChunkedKVCache) -> None:
        """Raises ModelError for a window that keeps its first tokens."""
        self.offset = 0
        self.is_chunked = isinstance(cache, ChunkedKVCache)
        self.window: int | None = None
        if isinstance(cache, RotatingKVCache):
            if cache.keep:
                raise ModelError(f"a sliding window that keeps its first {cache.keep} tokens")
            self.window = int(cache.max_size)
        elif isinstance(cache, ChunkedKVCache):
            self.window = int(cache.chunk_size)
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


Recording: TypeAlias = "RecordingCache | ArraysCache | tuple[Recording, ...]"


def discover(model: Module) -> Layout:
    """Each cache's kind, shapes and dtypes; dtype and width (vocabulary) of the logits.

    Runs one lazy forward of a few tokens through recording caches. Raises ModelError when
    the model does not run so, or keeps a cache of an unknown kind.
    """
    caches = [_recording(index, cache) for index, cache in enumerate(make_prompt_cache(model))]
    try:
        logits: mx.array = model(mx.zeros((1, DISCOVERY_TOKENS), mx.int32), cache=caches)
    except RUN_ERRORS as error:
        raise ModelError(
            f"the model does not run through cache views: {run_problem(error)}"
        ) from error
    recordings = [leaf for leaf in _leaves(caches) if isinstance(leaf, RecordingCache)]

    def spec(leaf: RecordingCache | ArraysCache) -> CacheSpec:
        return _kv_spec(leaf, recordings) if isinstance(leaf, RecordingCache) else _state_spec(leaf)

    return Layout(tree_map(spec, tuple(caches)), logits.dtype, logits.shape[-1])


def _recording(index: int, cache: object) -> Recording:
    if isinstance(cache, CacheList):
        return tuple(_recording(index, part) for part in cache.caches)
    if type(cache) in (KVCache, RotatingKVCache, ChunkedKVCache):
        return RecordingCache(cache)
    if type(cache) is ArraysCache:
        return cache
    raise ModelError(
        f"layer {index} keeps a {type(cache).__name__}, a cache of its own kind; served are full "
        "attention, sliding windows, chunks and recurrent states"
    )


def _state_spec(cache: ArraysCache) -> StateSpec:
    if any(array is None for array in cache.cache):
        raise ModelError("a recurrent layer leaves its cache empty")
    arrays = tuple(ArrayShape(array.shape[1:], array.dtype) for array in cache.cache)
    return StateSpec(arrays, saved=arrays)


def _kv_spec(cache: RecordingCache, recordings: list[RecordingCache]) -> CacheSpec:
    if cache.written is None:
        return UnusedSpec()
    keys, values = cache.written
    shape = LayerShape(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype, values.dtype)
    if cache.is_chunked:
        return ChunkedCacheSpec(shape, cache.window)
    if cache.window is None:
        return KVCacheSpec(shape)
    # One layer of a kind makes the mask for all, and some ask for more than they keep.
    asked = [other.asked_window for other in recordings if other.window == cache.window]
    return KVCacheSpec(shape, max(cache.window, *asked))
