"""Several parts in one forward: each token is a row, and each part attends by itself."""

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

    def __init__(self, parts: Sequence[Forward]) -> None:
        self._parts = parts
        counts = [part.rows * part.length for part in parts]
        self.rows = sum(counts)
        self.bounds = np.cumsum([0, *counts]).tolist()  # of each part among the tokens
        positions = [part.starts_host[:, None] + np.arange(part.length) for part in parts]
        firsts = mx.array(np.concatenate([each.ravel() for each in positions]).astype(np.int32))
        self.offset, self.offset_after = firsts, firsts + 1
        self._places: dict[int, mx.array] = {}
        self._cleared: dict[int, mx.array | None] = {}
        self._masks: dict[int | None, mx.array] = {}

    def mask(self, window: int | None = None) -> mx.array:
        """What stands for the mask of that window until a part makes its own."""
        if window not in self._masks:
            self._masks[window] = mx.ones((self.rows, 1, 1, 1), dtype=mx.bool_)
        return self._masks[window]

    def window_of(self, mask: mx.array | str | None) -> int | None:
        """Of which window that is the mask. Raises ValueError for one that is not from here."""
        if mask is None:
            return None
        for window, own in self._masks.items():
            if own is mask:
                return window
        raise ValueError("the model makes masks of its own")

    def places(self, kv_heads: int) -> mx.array:
        if kv_heads not in self._places:
            self._places[kv_heads] = mx.concatenate([part.places(kv_heads) for part in self._parts])
        return self._places[kv_heads]

    def cleared(self, kv_heads: int) -> mx.array | None:
        if kv_heads not in self._cleared:
            found = [part.cleared(kv_heads) for part in self._parts]
            places = [each for each in found if each is not None]
            self._cleared[kv_heads] = mx.concatenate(places) if places else None
        return self._cleared[kv_heads]


class JoinedView(KVView):
    """One layer. Attention is all that a token has with others, so it is all that is parted.

    It takes models whose layers pass on to attention what their cache gave them. Others it refuses
    with a ValueError.
    """

    def __init__(
        self, layer: LayerArena, joined: JoinedForward, parts: Sequence[CacheView]
    ) -> None:
        super().__init__(layer, joined)
        self._joined = joined
        self._parts = parts

    def fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """The new ones: each row has one key, and the parts have theirs."""
        for part in self._parts:
            part.gather()
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
            _attend(part, queries[first:last], scale, window, sinks)
            for part, first, last in zip(
                self._parts, self._joined.bounds, self._joined.bounds[1:], strict=False
            )
        ]
        return mx.concatenate(outputs)


class UnreadView(CacheView):
    """Of a part whose tokens have seen nothing: what they become is never stored nor read."""

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
    part: CacheView, queries: mx.array, scale: float, window: int | None, sinks: mx.array | None
) -> mx.array:
    """Of one part, whose tokens lie row by row."""
    rows, length = part.forward.rows, part.forward.length
    n_tokens, heads, _, key_dim = queries.shape
    by_row = queries.reshape(rows, length, heads, key_dim).swapaxes(1, 2)
    keys, values = part.keys_and_values()
    mask = part.make_mask(length, window_size=window)
    output = scaled_dot_product_attention(by_row, keys, values, part, scale, mask, sinks)
    return output.swapaxes(1, 2).reshape(n_tokens, heads, 1, -1)
