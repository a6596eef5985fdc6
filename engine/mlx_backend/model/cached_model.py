"""A model over the storage of all groups: runs pieces of sequences through cache views."""

from collections.abc import Sequence

import mlx.core as mx
from mlx.nn.layers.base import Module

from engine.mlx_backend.attention.strategy import Attention
from engine.mlx_backend.model.batching import FORWARD_TOKENS, Batching
from engine.mlx_backend.model.forward import Piece
from engine.mlx_backend.model.layout import Layout
from engine.mlx_backend.model.storage import Storage
from engine.mlx_backend.model.view_tree import ViewFactory


class CachedModel:
    """Runs forwards; what their tokens leave behind is in `storage` afterwards.

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

    def groups(
        self, pieces: Sequence[Piece], forward_tokens: int = FORWARD_TOKENS
    ) -> list[list[int]]:
        """Which pieces run in one forward, as indices; `forward_tokens` as in `Batching`."""
        return self._batching.group(pieces, forward_tokens)

    def forward(self, pieces: Sequence[Piece]) -> mx.array:
        """Logits of one forward, lazy, `[rows, length, vocabulary]`.

        Raises whatever the model raises; the pieces' blocks and states are undefined then.
        """
        views = ViewFactory(self.storage, self._layout, self._attention, self._batching, pieces)
        caches = [views.view(spec) for spec in self._layout.caches]
        logits: mx.array = self._model(views.forward.tokens, cache=caches)
        views.keep_states()
        return logits

    def last_logits(self, pieces: Sequence[Piece]) -> mx.array:
        """Logits after each piece, all of one token, `[rows, vocabulary]`; lazy if one forward."""
        groups = self.groups(pieces)
        if groups == [list(range(len(pieces)))]:
            return self.forward(pieces)[:, -1]
        rows: dict[int, mx.array] = {}
        for group in groups:
            logits = self.forward([pieces[index] for index in group])[:, -1:]
            # A read that is still under way holds the arena, and the next write would copy it.
            mx.eval(logits, self.storage.arrays())
            rows.update(zip(group, logits, strict=True))
        return mx.concatenate([rows[index] for index in range(len(pieces))])
