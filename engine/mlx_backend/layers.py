"""What each layer of a model caches, and whether the arena can hold it."""

from collections.abc import Sequence

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import KVCache, make_prompt_cache

from engine.mlx_backend.errors import UnsupportedModel
from kvstore.arena import LayerShape


class RecordingCache:
    """Stands in for one layer's cache in a forward of one token that is never evaluated."""

    def __init__(self) -> None:
        self.offset = 0
        self.written: tuple[mx.array, mx.array] | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.written = keys, values
        return self.written

    def keys_and_values(self) -> tuple[mx.array, mx.array] | None:
        return self.written

    def make_mask(
        self, length: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | None:
        return mx.ones((length, length), mx.bool_) if return_array else None


def require_plain_kv(model: Module) -> int:
    """The number of layers, all of which must use mlx-lm's plain KVCache.

    Raises UnsupportedModel naming the first layer that does not.
    """
    caches = make_prompt_cache(model)
    for index, cache in enumerate(caches):
        if type(cache) is not KVCache:
            raise UnsupportedModel(
                f"layer {index} keeps a {type(cache).__name__}; "
                "only models with full attention in every layer (KVCache) can be served so far"
            )
    return len(caches)


def discover(model: Module) -> tuple[tuple[LayerShape, ...], mx.Dtype, int]:
    """Each layer's shape, the dtype of K and V, and the width of the logits (the vocabulary).

    Runs one lazy forward of one token through recording caches; nothing is computed.
    Raises UnsupportedModel when layers differ in dtype or write no K and V.
    """
    caches = [RecordingCache() for _ in range(require_plain_kv(model))]
    try:
        logits: mx.array = model(mx.zeros((1, 1), mx.int32), cache=caches)
    except (AttributeError, TypeError, ValueError) as error:
        raise UnsupportedModel(f"the model does not run through cache views: {error}") from error
    written = [_written(index, cache) for index, cache in enumerate(caches)]
    dtypes = {array.dtype for pair in written for array in pair}
    if len(dtypes) != 1:
        raise UnsupportedModel(f"layers cache different dtypes: {sorted(map(str, dtypes))}")
    return _shapes(written), dtypes.pop(), logits.shape[-1]


def _written(index: int, cache: RecordingCache) -> tuple[mx.array, mx.array]:
    if cache.written is None:
        raise UnsupportedModel(f"layer {index} has a cache to which the model writes nothing")
    return cache.written


def _shapes(written: Sequence[tuple[mx.array, mx.array]]) -> tuple[LayerShape, ...]:
    return tuple(LayerShape(k.shape[1], k.shape[3], v.shape[3]) for k, v in written)
