"""The reference: gather every row's blocks, then the model's own attention. Any device."""

from collections.abc import Sequence

from engine.mlx_backend.cache_views import CacheView
from engine.mlx_backend.forward import Forward
from kvstore.arena import Arena


class GatherAttention:
    """Implements `Attention`."""

    def views(self, arena: Arena, forward: Forward) -> Sequence[CacheView]:
        return [CacheView(layer, forward) for layer in arena.layers]
