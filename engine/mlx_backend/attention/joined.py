"""Several row groups in one forward: each token is a row, and each group attends by itself."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from engine.mlx_backend.attention.dispatch import scaled_dot_product_attention
from engine.mlx_backend.model.cache_views import CacheView, KVView
from engine.mlx_backend.model.forward import Forward
from engine.mlx_backend.storage.arena import LayerArena


class JoinedForward:
    """Forwards without padding, one behind the other: as `Positions`, `[tokens, 1]`."""

    offset: mx.array | int
    offset_after: mx.array | int

    def __init__(self, forwards: Sequence[Forward]) -> None:
        self._forwards = forwards
        counts = [one.rows * one.length for one in forwards]
        self.rows = sum(counts)
        self.is_lone = self.rows == 1
        self.bounds = np.cumsum([0, *counts]).tolist()  # of each row group among the tokens
        positions = [one.starts_host[:, None] + np.arange(one.length) for one in forwards]
        firsts = mx.array(np.concatenate([each.ravel() for each in positions]).astype(np.int32))
        self.offset, self.offset_after = firsts, firsts + 1
        self._slot_mappings: dict[int, mx.array] = {}
        self._cleared: dict[int, mx.array | None] = {}
        self._masks: dict[int | None, mx.array] = {}

    def mask(self, window: int | None = None) -> mx.array:
        """Stands for the mask of that window until each row group makes its own."""
        if window not in self._masks:
            self._masks[window] = mx.ones((self.rows, 1, 1, 1), dtype=mx.bool_)
        return self._masks[window]

    def window_of(self, mask: mx.array | str | None) -> int | None:
        """The window whose mask that is. Raises ValueError for one that `mask` did not give."""
        if mask is None:
            return None
        for window, own in self._masks.items():
            if own is mask:
                return window
        raise ValueError("the model makes masks of its own")

    def slot_mapping(self, kv_heads: int) -> mx.array:
        if kv_heads not in self._slot_mappings:
            mappings = [one.slot_mapping(kv_heads) for one in self._forwards]
            self._slot_mappings[kv_heads] = mx.concatenate(mappings)
        return self._slot_mappings[kv_heads]

    def cleared(self, kv_heads: int) -> mx.array | None:
        if kv_heads not in self._cleared:
            found = [one.cleared(kv_heads) for one in self._forwards]
            mappings = [each for each in found if each is not None]
            self._cleared[kv_heads] = mx.concatenate(mappings) if mappings else None
        return self._cleared[kv_heads]


class JoinedView(KVView):
    """One layer, with a view for each row group. Attention alone is computed group by group: all
    else in a layer takes each token for itself.

    Raises ValueError for a model whose layers do not pass on to attention what their cache gave
    them.
    """

    def __init__(
        self, layer: LayerArena, joined: JoinedForward, views: Sequence[CacheView]
    ) -> None:
        super().__init__(layer, joined)
        self._joined = joined
        self._views = views

    def fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """The new ones: here each row has one key. The row groups' views have all of theirs."""
        for view in self._views:
            view.gather()
        return keys, values

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: mx.array | str | None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """As `KVView.attend`; `queries`: `[tokens, heads, 1, key_dim]`."""
        fetched = self.keys_and_values()
        if keys is not fetched[0] or values is not fetched[1]:
            raise ValueError("the model changes what its cache gives it before it attends")
        window = self._joined.window_of(mask)
        outputs = [
            _attend(view, queries[first:last], scale, window, sinks)
            for view, first, last in zip(
                self._views, self._joined.bounds, self._joined.bounds[1:], strict=False
            )
        ]
        return mx.concatenate(outputs)


class UnreadView(CacheView):
    """A view of a row group whose attention is not needed: nothing after it is stored or read."""

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: mx.array | str | None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Zeros, in the shape that `KVView.attend` gives."""
        return mx.zeros((*queries.shape[:3], self.layer.shape.value_dim), queries.dtype)


def _attend(
    view: CacheView, queries: mx.array, scale: float, window: int | None, sinks: mx.array | None
) -> mx.array:
    """The attention of one row group, whose tokens lie row by row."""
    rows, length = view.forward.rows, view.forward.length
    n_tokens, heads, _, key_dim = queries.shape
    by_row = queries.reshape(rows, length, heads, key_dim).swapaxes(1, 2)
    keys, values = view.keys_and_values()
    mask = view.make_mask(length, window_size=window)
    output = scaled_dot_product_attention(by_row, keys, values, view, scale, mask, sinks)
    return output.swapaxes(1, 2).reshape(n_tokens, heads, 1, -1)
