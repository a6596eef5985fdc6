"""The interface of an attention strategy, and the reference, `gather`. `cpu/` has another."""

import math
from collections.abc import Sequence
from typing import Protocol

from engine.mlx_backend.model.cache_views import CacheView
from engine.mlx_backend.model.forward import Forward
from engine.mlx_backend.storage.arena import Arena

KEY_READS = 4


class Attention(Protocol):
    """Makes the views through which a model's layers reach the arena."""

    @property
    def name(self) -> str:
        """As the setting `attention` names it."""
        ...

    @property
    def gathered_copies(self) -> int:
        """How often it holds the K and V that a forward has gathered in a layer, at most."""
        ...

    @property
    def padding_keys(self) -> float:
        """Padding rows by so many keys costs as much as one more forward; see `ForwardCost`."""
        ...

    def views(self, arena: Arena, forward: Forward) -> Sequence[CacheView]:
        """One view per layer for this forward."""
        ...


class GatherAttention:
    """The reference, for any device: gathers every row's blocks for the model's own attention.

    All rows of a forward are padded to the longest.
    """

    name = "gather"
    gathered_copies = 1

    def __init__(self, padding_keys: float = math.inf) -> None:
        self.padding_keys = padding_keys

    def views(self, arena: Arena, forward: Forward) -> Sequence[CacheView]:
        return [CacheView(layer, forward) for layer in arena.layers]


def gathered_padding_keys(weight_bytes: int, token_bytes: int) -> float:
    """`padding_keys` of GatherAttention for a model of such size.

    A forward reads all weights, while a key is read, written and read again. On two cores a padded
    key took the time of 2 to 6 reads of its bytes at the speed at which a forward reads weights.
    """
    return weight_bytes / (KEY_READS * token_bytes) if token_bytes else math.inf
