"""What a model's layers keep, found by running the model, and the layout of its caches."""

import re
from collections.abc import Sequence
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
class OpenGroupSpec(KVCacheSpec):
    """K and V of the tokens since the last multiple of `ratio`."""

    ratio: int = 1


@dataclass(frozen=True, slots=True)
class StateSpec:
    """The arrays of a recurrent state, and how each is saved."""

    arrays: tuple[ArrayShape, ...]
    saved: tuple[ArrayShape, ...]


@dataclass(frozen=True, slots=True)
class UnusedSpec:
    """A cache that the model makes and never writes."""


class CompressedSpecs(tuple[KVCacheSpec, ...]):
    """What a layer of DeepSeek-V4.1 keeps: a vector of each token in its window; where it
    compresses, KV and index key of each group of `stride` tokens; and, of more than one, an
    `OpenGroupSpec`, from which a group is compressed when its last token comes.
    """


CacheSpec: TypeAlias = KVCacheSpec | StateSpec | UnusedSpec
SpecTree: TypeAlias = "CacheSpec | tuple[SpecTree, ...]"
"""One cache, or the caches of a layer that keeps several."""


@dataclass(frozen=True)
class Layout:
    """A model's caches, one tree for each that `make_prompt_cache` returns.

    `selected_bytes`: of the vectors that sparse attention copies for each token, in one layer.
    """

    caches: tuple[SpecTree, ...]
    logits_dtype: mx.Dtype
    vocab_size: int
    selected_bytes: int = 0

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
        """The dtypes in which the model computes K and V, in order of appearance; without K and V,
        that of the logits.
        """
        computed = (shape for shape in self.kv_layers if not shape.is_fixed)
        kept = [dtype for shape in computed for _, dtype in shape.vectors]
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
    def n_planes(self) -> int:
        """The number of arrays that hold the K and V of all layers."""
        return sum(len(shape.parts) // (1 + shape.heads.share_plane) for shape in self.kv_layers)

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

    def in_blocks_of(self, block_size: int) -> "Layout":
        """The layout over blocks of `block_size` tokens, with the shortest windows in whose blocks
        open groups lie: a hit of whole groups and blocks then needs no slot of theirs.

        Raises ModelError where a group is neither a part of a block nor made of whole ones.
        """
        for shape in self.kv_layers:
            if block_size % shape.stride and shape.stride % block_size:
                raise ModelError(
                    f"the model compresses groups of {shape.stride} tokens, which do not fit into "
                    f"blocks of {block_size}: set block_size to a multiple of {shape.stride}"
                )

        def within_block(spec: CacheSpec) -> CacheSpec:
            match spec:
                case OpenGroupSpec(window=int(), ratio=ratio):
                    return replace(spec, window=max(1, ratio - block_size + 1))
                case _:
                    return spec

        return replace(self, caches=tree_map(within_block, self.caches))


def _smaller(array: ArrayShape, half: mx.Dtype | None) -> ArrayShape:
    """The array in half precision, if it is of numbers that are larger."""
    is_real = mx.issubdtype(array.dtype, mx.floating)
    return replace(array, dtype=half) if half and is_real and array.dtype.size > 2 else array


def _leaves(tree: object) -> list[Any]:
    return list(dict(tree_flatten(tree)).values())


COMPRESSED_MODULE = "mlx_lm.models.deepseek_v41"
"""mlx-lm's module whose attention compresses groups of tokens."""

FP8_GROUP, FP4_GROUP, FP4_KEY_GROUP = 32, 16, 32
"""Numbers that share a scale where that model rounds the window's vectors, compressed KV and index
keys. It rounds no vectors that such groups do not divide.
"""

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
    ratios = [layer.self_attn.ratio for layer in model.layers] if _is_compressed(caches[0]) else []
    n_tokens = max([DISCOVERY_TOKENS, *ratios])
    try:
        logits: mx.array = model(mx.zeros((1, n_tokens), mx.int32), cache=caches)
    except RUN_ERRORS as error:
        raise ModelError(
            f"the model does not run through cache views: {run_problem(error)}"
        ) from error
    recordings = [leaf for leaf in _leaves(caches) if isinstance(leaf, RecordingCache)]

    def spec(leaf: RecordingCache | ArraysCache) -> CacheSpec:
        return _kv_spec(leaf, recordings) if isinstance(leaf, RecordingCache) else _state_spec(leaf)

    if ratios:
        kept = tuple(map(_compressed_specs, caches, ratios))
        return Layout(kept, logits.dtype, logits.shape[-1], _selected_bytes(model, kept))
    return Layout(tree_map(spec, tuple(caches)), logits.dtype, logits.shape[-1])


def _recording(index: int, cache: object) -> Recording:
    if isinstance(cache, CacheList):
        return tuple(_recording(index, part) for part in cache.caches)
    if type(cache) in (KVCache, RotatingKVCache, ChunkedKVCache):
        return RecordingCache(cache)
    if type(cache) is ArraysCache or _is_compressed(cache):
        return cache
    raise ModelError(
        f"layer {index} keeps a {type(cache).__name__}, a cache of its own kind; served are full "
        "attention, sliding windows, chunks and recurrent states"
    )


def _is_compressed(cache: object) -> bool:
    return type(cache).__module__ == COMPRESSED_MODULE


def _compressed_specs(cache: Any, ratio: int) -> CompressedSpecs:
    """What the model has left in mlx-lm's cache of a layer, each array `[1, vectors, dim]`."""
    window, window_dtype = cache.window, _held_by(cache.window, FP8_GROUP)
    shape = LayerShape(1, window.shape[-1], 0, window_dtype, window_dtype, is_fixed=True)
    specs = [KVCacheSpec(shape, int(cache.window_size))]
    if cache.compress_kv is not None:
        if ratio & (ratio - 1):  # else they would fit into no blocks of the check
            raise ModelError(f"groups of {ratio} tokens are compressed; served are powers of two")
        kv, keys = cache.compress_kv, cache.index_k
        shape = LayerShape(
            kv_heads=1,
            key_dim=kv.shape[-1],
            value_dim=0 if keys is None else keys.shape[-1],
            key_dtype=_held_by(kv, FP4_GROUP),
            value_dtype=kv.dtype if keys is None else _held_by(keys, FP4_KEY_GROUP),
            stride=ratio,
            is_fixed=True,
        )
        specs.append(KVCacheSpec(shape))
    if cache.pending_kv is not None:
        kv, gate = cache.pending_kv, cache.pending_gate
        dims = kv.shape[-1], gate.shape[-1]
        shape = LayerShape(1, *dims, kv.dtype, gate.dtype, is_fixed=True)
        specs.append(OpenGroupSpec(shape, ratio, ratio))
    return CompressedSpecs(specs)


def _selected_bytes(model: Module, specs: Sequence[CompressedSpecs]) -> int:
    """Bytes of what a token's attention copies: the vectors of its window and of the groups that
    are chosen for it, as they are kept, joined, and twice in float32.
    """
    window = specs[0][0]
    indexers = [layer.self_attn.get("indexer") for layer in model.layers]
    chosen = max((own.index_topk for own in indexers if own is not None), default=0)
    copies = 2 * (window.shape.key_dtype.size + mx.float32.size)
    return ((window.window or 0) + chosen) * window.shape.key_dim * copies


def _held_by(vectors: mx.array, group: int) -> mx.Dtype:
    """The type that vectors are kept in. Numbers of 4 or 8 bits, times the scale of their group,
    are exact in 16 bits.
    """
    return vectors.dtype if vectors.shape[-1] % group else mx.bfloat16


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
