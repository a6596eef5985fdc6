"""A model over the storage of all groups: runs pieces of sequences through cache views."""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
from mlx.nn.layers.base import Module

from engine.mlx_backend.attention.strategy import Attention
from engine.mlx_backend.model.batching import FORWARD_TOKENS, Batching, ForwardCost
from engine.mlx_backend.model.forward import Piece
from engine.mlx_backend.model.layout import Layout
from engine.mlx_backend.model.storage import Storage
from engine.mlx_backend.model.view_tree import ViewFactory


@dataclass(frozen=True, slots=True)
class Computed:
    """A forward that has been laid out: all lazy.

    `logits`: `[rows, length, vocabulary]`. Who evaluates `witnesses` has all written that the
    forward leaves in the storage; unlike the storage's own arrays they may be evaluated while
    another forward is in flight.
    """

    logits: mx.array
    witnesses: list[mx.array]


class CachedModel:
    """Lays out forwards over `storage`, one after another.

    Belongs to the thread that made it, as all MLX arrays do.
    """

    def __init__(
        self,
        model: Module,
        layout: Layout,
        storage: Storage,
        attention: Attention,
        batching: Batching,
    ) -> None:
        self.storage = storage
        self._model = model
        self._layout = layout
        self._attention = attention
        self._batching = batching

    @property
    def n_groups(self) -> int:
        """Groups of the store: a table for each comes with a piece."""
        return len(self._layout.windows) + bool(self._layout.states)

    def groups(
        self, pieces: Sequence[Piece], forward_tokens: int = FORWARD_TOKENS
    ) -> list[list[int]]:
        """Which pieces run in one forward, as indices; `forward_tokens` as in `ForwardCost`."""
        cost = ForwardCost(forward_tokens, self._attention.padding_keys)
        return self._batching.group(pieces, cost)

    def forward(self, pieces: Sequence[Piece], tokens: mx.array) -> Computed:
        """One forward; `tokens`, `[rows, length]`, are padded on the right.

        Raises whatever the model raises; the pieces' blocks and states are undefined then.
        """
        views = ViewFactory(self.storage, self._layout, self._attention, self._batching, pieces)
        caches = [views.view(spec) for spec in self._layout.caches]
        logits: mx.array = self._model(tokens, cache=caches)
        views.keep_states()
        return Computed(logits, views.witnesses() + self.storage.states.unevaluated())
