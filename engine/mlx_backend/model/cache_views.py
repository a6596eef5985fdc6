"""What an unmodified mlx-lm model sees in place of its own caches: one view per cache, per forward.

A view answers what mlx-lm's own cache answers during a forward and is backed by the arena. It lives
no longer than the forward, because it refers to the arena's arrays (see `storage/arena.py`).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from engine.mlx_backend.model.forward import Forward
from engine.mlx_backend.storage.arena import LayerArena


class Positions(Protocol):
    """What the views of a forward know of its tokens, `[rows, length]`.

    `offset` and `offset_after`: the position of each row's first token, and the one after its last.
    `is_lone`: there is one row, and no padding behind its keys.
    """

    rows: int
    is_lone: bool
    offset: mx.array | int
    offset_after: mx.array | int

    def mask(self, window: int | None = None) -> mx.array:
        """Which keys each token sees."""
        ...

    def slot_mapping(self, kv_heads: int) -> mx.array:
        """The slots that K and V are written to in a layer of `kv_heads`; see `Arena`."""
        ...

    def cleared(self, kv_heads: int) -> mx.array | None:
        """The slots to zero before that, as a slot mapping; None where there are none."""
        ...


class UnusedView:
    """A cache that the model never writes: it knows positions and nothing else."""

    def __init__(self, positions: Positions) -> None:
        self._positions = positions
        self.offset = positions.offset

    def make_mask(
        self, length: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """The attention mask of this forward, in mlx-lm's terms; see `create_attention_mask`."""
        if self._positions.is_lone and not return_array and window_size is None:
            return None if length == 1 else "causal"
        return self._positions.mask(window_size)


class KVView(UnusedView, ABC):
    """One layer's K and V, for one forward.

    `offset`: `[rows]`, the position of each row's next token. `keys` and `values` are there from
    `update_and_fetch` on; a model may read and replace them, with no effect on what is stored.
    """

    def __init__(self, layer: LayerArena, positions: Positions) -> None:
        super().__init__(positions)
        self.layer = layer
        self.fetched: tuple[mx.array, mx.array] | None = None
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write the new tokens' K and V; what the model is to pass on to attention."""
        kv_heads = self.layer.shape.kv_heads
        cleared = self._positions.cleared(kv_heads)
        if cleared is not None:
            self.layer.clear(cleared)
        self.layer.write(self._positions.slot_mapping(kv_heads), keys, values)
        self.offset = self._positions.offset_after
        self.fetched = self.keys, self.values = self.fetch(keys, values)
        return self.fetched

    def whole_mask(self, mask: mx.array | str | None) -> mx.array | str | None:
        """The mask for the model's own attention to what this view has fetched."""
        return mask

    @abstractmethod
    def fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """What stands for all K and V, when these, the new ones, have been written."""

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """What `update_and_fetch` returned; models that share KV between layers ask again."""
        if self.fetched is None:
            raise RuntimeError("the model reads a layer's cache before writing to it")
        return self.fetched

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: mx.array | str | None,
        sinks: mx.array | None = None,
    ) -> mx.array | None:
        """The attention's output, `[rows, heads, length, value_dim]`, if this view computes it.

        None leaves it to the model's own function, as the reference does.
        """
        return None


class CacheView(KVView):
    """A layer, in a forward of one row group: all its rows' keys, `[rows, kv_heads, keys, dim]`."""

    def __init__(self, layer: LayerArena, forward: Forward) -> None:
        super().__init__(layer, forward)
        self.forward = forward

    def fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return self.gather()

    def gather(self) -> tuple[mx.array, mx.array]:
        """Every row's K and V as written. It is lazy: nothing is read unless it is used."""
        fetched = self.layer.read(self.forward.heads(self.layer.shape.kv_heads))
        if self.forward.is_lone:
            n_keys = self.forward.n_keys
            fetched = fetched[0][:, :, :n_keys], fetched[1][:, :, :n_keys]
        self.fetched = fetched
        return fetched

    def by_kv_head(self, queries: mx.array) -> mx.array:
        """`[rows, heads, length, key_dim]` to `[rows, kv_heads, group, length, key_dim]`."""
        rows, heads, length, key_dim = queries.shape
        kv_heads = self.layer.shape.kv_heads
        return queries.reshape(rows, kv_heads, heads // kv_heads, length, key_dim)

    def is_causal_attention(
        self, keys: mx.array, values: mx.array, mask: object, sinks: mx.array | None
    ) -> bool:
        """Whether the model passes on just what this view gave it: all keys, causal mask."""
        if self.fetched is None or keys is not self.fetched[0] or values is not self.fetched[1]:
            return False
        if sinks is not None:
            return False
        if isinstance(mask, mx.array):
            return mask is self.forward.mask()
        return mask == self.make_mask(self.forward.length) if self.forward.rows == 1 else False


class WindowView(CacheView):
    """A sliding window's layer: K and V begin with the first block that a row holds."""

    def __init__(self, layer: LayerArena, forward: Forward, window: int) -> None:
        super().__init__(layer, forward)
        self._window = window

    def make_mask(
        self, length: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        return self.forward.mask(window_size or self._window)


class ChunkedView(CacheView):
    """A layer of chunked attention, of one row; the model makes the mask from positions."""

    @property
    def start_position(self) -> int:
        """The position of the first key."""
        return int(self.forward.first_positions[0])

    def maybe_trim_front(self) -> None:
        """What no token sees any more is not among the row's blocks."""


class StateView(ArraysCache):  # type: ignore[misc]  # a base class without types
    """A recurrent layer's state of several rows; `cache` is what the model has put there."""

    cache: list[Any]

    def __init__(self, arrays: Sequence[mx.array | None], lengths: mx.array | None) -> None:
        super().__init__(len(arrays))
        self.cache = list(arrays)
        self.lengths = lengths

    def advance(self, N: int) -> None:  # noqa: N803 - as mlx-lm has it
        """Rebinds `lengths`, which all layers share; mlx-lm's own changes the array."""
        if self.lengths is not None:
            self.lengths = self.lengths - N
