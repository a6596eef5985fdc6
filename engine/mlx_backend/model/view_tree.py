"""The views of one forward, in the shape in which the model keeps its caches."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias, TypeVar

import mlx.core as mx

from engine.mlx_backend.attention.joined import JoinedForward, JoinedView, UnreadView
from engine.mlx_backend.attention.strategy import Attention
from engine.mlx_backend.model.batching import Batching
from engine.mlx_backend.model.cache_views import (
    CacheView,
    ChunkedView,
    KVView,
    StateView,
    UnusedView,
    WindowView,
)
from engine.mlx_backend.model.forward import Forward, TokenSpan
from engine.mlx_backend.model.forward_batch import ForwardBatch
from engine.mlx_backend.model.layout import (
    ChunkedCacheSpec,
    KVCacheSpec,
    Layout,
    SpecTree,
    StateSpec,
    UnusedSpec,
)
from engine.mlx_backend.storage.arena import Arena
from engine.mlx_backend.storage.storage import Storage
from kvstore.types import SlotId
from kvstore.window import first_needed

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
