"""Puts our attention into a loaded model, at the one function that mlx-lm's models call for it."""

import sys

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models import base

from engine.mlx_backend.model.cache_views import KVView

_original = base.scaled_dot_product_attention


def scaled_dot_product_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: object,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None = None,
) -> mx.array:
    """mlx-lm's function of that name, which asks the cache first."""
    if isinstance(cache, KVView):
        output = cache.attend(queries, keys, values, scale, mask, sinks)
        if output is not None:
            return output
        mask = cache.whole_mask(mask)
    result: mx.array = _original(
        queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks
    )
    return result


def install(model: Module) -> None:
    """Let the modules that this model's layers come from call the function above.

    Stateless and idempotent. With caches other than ours a model computes what it did before.
    """
    for name in {type(module).__module__ for _, module in model.named_modules()}:
        namespace = vars(sys.modules[name])
        if namespace.get("scaled_dot_product_attention") is _original:
            namespace["scaled_dot_product_attention"] = scaled_dot_product_attention
