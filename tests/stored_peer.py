"""mlx-lm's own model, whose caches hold what a KV format stores of K and V."""

from collections.abc import Callable, Iterable
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from engine.mlx_backend.kv.layout import KVCacheSpec, Layout
from engine.mlx_backend.kv.shape import LayerShape

Update = Callable[[mx.array, mx.array], tuple[mx.array, mx.array]]


def store_in_format(model: Module, layout: Layout) -> None:
    """Let a model of mlx-lm attend to K and V as `layout` stores them: each vector is encoded and
    decoded, by itself, before the model's own cache has it.
    """
    make_caches = getattr(model, "make_cache", None) or (lambda: make_prompt_cache(model))

    def make_cache() -> list[Any]:
        if "make_cache" in vars(model):
            del model.make_cache
        try:
            caches: list[Any] = make_caches()
        finally:
            model.make_cache = make_cache
        leaves = dict(tree_flatten([_parts(cache) for cache in caches])).values()
        for cache, spec in zip(leaves, layout.specs, strict=True):
            if isinstance(spec, KVCacheSpec):
                cache.update_and_fetch = _storing(cache.update_and_fetch, spec.shape)
        return caches

    model.make_cache = make_cache


def stores_in_format(model: Module) -> bool:
    """Whether `store_in_format` has changed the model."""
    return "make_cache" in vars(model)


def _parts(cache: Any) -> Any:
    return [_parts(part) for part in cache.caches] if hasattr(cache, "caches") else cache


def _storing(update: Update, shape: LayerShape) -> Update:
    def stored(keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return update(*through(shape, keys, values))

    return stored


def through(shape: LayerShape, keys: mx.array, values: mx.array) -> Iterable[mx.array]:
    """K and V, `[rows, kv_heads, tokens, dim]`, as attention sees them once they are stored."""
    for vectors, codec, is_rotated in zip(
        (keys, values), shape.codecs, (shape.is_rotated, False), strict=True
    ):
        rows = mx.hadamard_transform(vectors) if is_rotated else vectors
        decoded = codec.decode(codec.encode(rows.reshape(-1, codec.dim))).reshape(vectors.shape)
        yield mx.hadamard_transform(decoded) if is_rotated else decoded
