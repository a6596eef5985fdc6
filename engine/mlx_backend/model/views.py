"""What an unmodified mlx-lm model sees in place of its own caches, and how its queries meet blocks.

A view answers what mlx-lm's own cache answers during a forward and is backed by the arena. It lives
no longer than the forward, because it refers to the arena's arrays (see `kv/arena.py`).
"""

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeAlias, TypeVar

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx_lm.models import base
from mlx_lm.models.cache import ArraysCache

from engine.mlx_backend.kv.arena import Arena, LayerArena
from engine.mlx_backend.kv.storage import Storage
from engine.mlx_backend.model.forward import Batching, Forward, ForwardBatch, TokenSpan
from engine.mlx_backend.model.layout import (
    ChunkedCacheSpec,
    KVCacheSpec,
    Layout,
    SpecTree,
    StateSpec,
    UnusedSpec,
)
from kvstore.types import SlotId
from kvstore.window import first_needed


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


_mlx_lm_attention = base.scaled_dot_product_attention


def scaled_dot_product_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: object,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None = None,
) -> mx.array:
    """mlx-lm's function of that name, which asks the cache first."""
    if isinstance(cache, KVView):
        output = cache.attend(queries, keys, values, scale, mask, sinks)
        if output is not None:
            return output
        mask = cache.whole_mask(mask)
    result: mx.array = _mlx_lm_attention(
        queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks
    )
    return result


def install_attention(model: Module) -> None:
    """Let the modules that this model's layers come from call the function above.

    Stateless and idempotent. With caches other than ours a model computes what it did before.
    """
    for name in {type(module).__module__ for _, module in model.named_modules()}:
        namespace = vars(sys.modules[name])
        if namespace.get("scaled_dot_product_attention") is _mlx_lm_attention:
            namespace["scaled_dot_product_attention"] = scaled_dot_product_attention


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


T = TypeVar("T")

ViewTree: TypeAlias = "UnusedView | StateView | list[ViewTree]"
"""One view, or those of a layer that keeps several caches."""


class ViewFactory:
    """Makes one forward's views, asked for in the order of the layout's caches.

    Several row groups are joined. Raises ValueError where a cache cannot be: one not of K and V.
    """

    def __init__(
        self,
        storage: Storage,
        layout: Layout,
        attention: Attention,
        batching: Batching,
        batch: ForwardBatch,
    ) -> None:
        row_groups = batch.row_groups
        full = [batching.forward(spans, storage.full) for spans in row_groups]
        self._views: dict[int | None, _ArenaViews] = {
            None: _ArenaViews(
                full, zip(*(attention.views(storage.full, f) for f in full), strict=True)
            )
        }
        for index, (window, arena) in enumerate(zip(layout.windows, storage.windows, strict=True)):
            forwards = [
                batching.forward(_windowed(spans, index, window, arena.block_size), arena)
                for spans in row_groups
            ]
            self._views[window] = _ArenaViews(forwards, _window_views(arena, forwards, window))
        self._storage = storage.states
        self._slots = _state_slots(_only(row_groups)) if layout.states else []
        is_fresh = row_groups[0][0].start == 0
        self._states = iter(
            batching.read_states(storage.states, self._slots, is_fresh) if self._slots else ()
        )
        self._lengths = _lengths(full[0])
        self._state_views: list[StateView] = []
        self._unread = batch.unread
        self._n_layers_left = len(layout.kv_layers)
        self._first: KVView | None = None
        self._last: KVView | None = None

    def view(self, spec: SpecTree) -> ViewTree:
        """The next view of this kind."""
        match spec:
            case tuple():
                return [self.view(part) for part in spec]
            case StateSpec(arrays):
                return self._state_view(len(arrays))
            case UnusedSpec():
                return UnusedView(self._views[None].positions)
            case _:
                self._last = self._kv_view(spec)
                self._first = self._first or self._last
                return self._last

    def keep_states(self) -> None:
        """Store what the model has left in its recurrent layers' views."""
        if self._slots:
            arrays = [array for view in self._state_views for array in view.cache]
            self._storage.write(self._slots, arrays)

    def first_fences(self) -> list[mx.array]:
        """Fences of the first layer with K and V; see `LayerArena.fences`."""
        return self._first.layer.fences() if self._first is not None else []

    def fences(self) -> list[mx.array]:
        """Fences of the last layer with K and V, which depends on all layers before it."""
        return self._last.layer.fences() if self._last is not None else []

    def _kv_view(self, spec: KVCacheSpec | ChunkedCacheSpec) -> KVView:
        of_arena = self._views[spec.window]
        views = next(of_arena.by_layer)
        self._n_layers_left -= 1
        if isinstance(spec, ChunkedCacheSpec):
            view = _only(views)
            return ChunkedView(view.layer, view.forward)
        if isinstance(of_arena.positions, JoinedForward):
            return JoinedView(views[0].layer, of_arena.positions, self._attending(views))
        return _only(views)

    def _attending(self, views: Sequence[CacheView]) -> list[CacheView]:
        """In the last layer the output of attention is not needed for tokens that are not read."""
        unread = self._unread if self._n_layers_left == 0 else ()
        return [
            UnreadView(view.layer, view.forward) if index in unread else view
            for index, view in enumerate(views)
        ]

    def _state_view(self, n_arrays: int) -> StateView:
        view = StateView([next(self._states) for _ in range(n_arrays)], self._lengths)
        self._state_views.append(view)
        return view


class _ArenaViews:
    """The views of one arena's layers, layer by layer: one view for each row group."""

    def __init__(
        self, forwards: Sequence[Forward], by_layer: Iterator[Sequence[CacheView]]
    ) -> None:
        self.positions = forwards[0] if len(forwards) == 1 else JoinedForward(forwards)
        self.by_layer = by_layer


def _window_views(
    arena: Arena, forwards: Sequence[Forward], window: int
) -> Iterator[Sequence[CacheView]]:
    for layer in arena.layers:
        yield [WindowView(layer, forward, window) for forward in forwards]


def _only(of_groups: Sequence[T]) -> T:
    """What there is of the only row group. Raises ValueError where there are several."""
    if len(of_groups) > 1:
        raise ValueError("its caches take no rows of unlike length in one forward")
    return of_groups[0]


def _windowed(
    spans: Sequence[TokenSpan], group: int, window: int, block_size: int
) -> list[TokenSpan]:
    """The spans over a window's blocks, from the first with a key that a token sees."""
    firsts = [first_needed(span.start, window, block_size) for span in spans]
    return [
        replace(span, blocks=span.groups[group][first:], first_block=first)
        for span, first in zip(spans, firsts, strict=True)
    ]


def _state_slots(spans: Sequence[TokenSpan]) -> list[SlotId]:
    return [SlotId(int(span.groups[-1][0])) for span in spans]  # the recurrent group is the last


def _lengths(forward: Forward) -> mx.array | None:
    """Each row's number of tokens, `[rows]`; None when no row is padded."""
    lengths = [span.n_tokens for span in forward.spans]
    return mx.array(lengths) if min(lengths) < forward.length else None
