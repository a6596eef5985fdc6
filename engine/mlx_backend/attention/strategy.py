"""What the runner asks of an attention strategy, and the reference."""

from collections.abc import Sequence
from typing import Protocol

from engine.mlx_backend.model.cache_views import CacheView
from engine.mlx_backend.model.forward import Forward
from kvstore.arena import Arena


class Attention(Protocol):
    """Makes the views through which a model's layers reach the arena."""

    def views(self, arena: Arena, forward: Forward) -> Sequence[CacheView]:
        """One view per layer for this forward."""
        ...


class GatherAttention:
    """The reference: gather every row's blocks, then the model's own attention. Any device."""

    def views(self, arena: Arena, forward: Forward) -> Sequence[CacheView]:
        return [CacheView(layer, forward) for layer in arena.layers]
