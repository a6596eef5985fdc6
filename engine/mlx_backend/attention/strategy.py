"""What the runner asks of an attention strategy."""

from collections.abc import Sequence
from typing import Protocol

from engine.mlx_backend.cache_views import CacheView
from engine.mlx_backend.forward import Forward
from kvstore.arena import Arena


class Attention(Protocol):
    """Makes the views through which a model's layers reach the arena."""

    def views(self, arena: Arena, forward: Forward) -> Sequence[CacheView]:
        """One view per layer for this forward."""
        ...
