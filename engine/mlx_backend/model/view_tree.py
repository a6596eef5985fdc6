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
    ChunkView,
    KVView,
    StateView,
    UnusedView,
    WindowView,
)
from engine.mlx_backend.model.forward import Forward, Piece
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
from kvstore.groups.window import first_needed
from kvstore.types import SlotId

T = TypeVar("T")

ViewTree: TypeAlias = "UnusedView | StateView | list[ViewTree]"
"""One view, or those of a layer that keeps several caches."""


class ViewFactory:
    """Makes one forward's views, asked for in the order of the layout's caches.

    Several parts are joined. Raises ValueError where a cache is not of K and V, and cannot be.
    """

    def __init__(
        self,
        storage: Storage,
        layout: Layout,
        attention: Attention,
        batching: Batching,
        batch: ForwardBatch,
    ) -> None:
        parts = batch.pieces
        full = [batching.forward(pieces, storage.full) for pieces in parts]
        self._lanes: dict[int | None, _Lane] = {
            None: _Lane(full, zip(*(attention.views(storage.full, f) for f in full), strict=True))
        }
        for index, (window, arena) in enumerate(zip(layout.windows, storage.windows, strict=True)):
            forwards = [
                batching.forward(_windowed(pieces, index, window, arena.block_size), arena)
                for pieces in parts
            ]
            self._lanes[window] = _Lane(forwards, _window_views(arena, forwards, window))
        self._storage = storage.states
        self._slots = _state_slots(_only(parts)) if layout.states else []
        is_fresh = parts[0][0].start == 0
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
                return UnusedView(self._lanes[None].positions)
            case _:
                self._last = self._kv_view(spec)
                self._first = self._first or self._last
                return self._last

    def keep_states(self) -> None:
        """Store what the model has left in its recurrent layers' views."""
        if self._slots:
            arrays = [array for view in self._state_views for array in view.cache]
            self._storage.write(self._slots, arrays)

    def beginning(self) -> list[mx.array]:
        """Witnesses of the first layer with K and V."""
        return self._first.layer.witnesses() if self._first is not None else []

    def witnesses(self) -> list[mx.array]:
        """Of the last layer with K and V: what layers before it have written leads there."""
        return self._last.layer.witnesses() if self._last is not None else []

    def _kv_view(self, spec: KVCacheSpec | ChunkedCacheSpec) -> KVView:
        lane = self._lanes[spec.window]
        views = next(lane.views)
        self._n_layers_left -= 1
        if isinstance(spec, ChunkedCacheSpec):
            view = _only(views)
            return ChunkView(view.layer, view.forward)
        if isinstance(lane.positions, JoinedForward):
            return JoinedView(views[0].layer, lane.positions, self._attending(views))
        return _only(views)

    def _attending(self, views: Sequence[CacheView]) -> list[CacheView]:
        """Behind the last layer's K and V nobody asks what unread tokens have seen."""
        unread = self._unread if self._n_layers_left == 0 else ()
        return [
            UnreadView(view.layer, view.forward) if part in unread else view
            for part, view in enumerate(views)
        ]

    def _state_view(self, n_arrays: int) -> StateView:
        view = StateView([next(self._states) for _ in range(n_arrays)], self._lengths)
        self._state_views.append(view)
        return view


class _Lane:
    """The layers of one arena: of each its views, one for each part."""

    def __init__(self, parts: Sequence[Forward], views: Iterator[Sequence[CacheView]]) -> None:
        self.positions = parts[0] if len(parts) == 1 else JoinedForward(parts)
        self.views = views


def _window_views(
    arena: Arena, parts: Sequence[Forward], window: int
) -> Iterator[Sequence[CacheView]]:
    for layer in arena.layers:
        yield [WindowView(layer, forward, window) for forward in parts]


def _only(parts: Sequence[T]) -> T:
    if len(parts) > 1:
        raise ValueError("its caches take no parts of unlike length in one forward")
    return parts[0]


def _windowed(pieces: Sequence[Piece], group: int, window: int, block_size: int) -> list[Piece]:
    """The pieces over a window's blocks, from the first with a key that a token sees."""
    firsts = [first_needed(piece.start, window, block_size) for piece in pieces]
    return [
        replace(piece, blocks=piece.groups[group][first:], first_block=first)
        for piece, first in zip(pieces, firsts, strict=True)
    ]


def _state_slots(pieces: Sequence[Piece]) -> list[SlotId]:
    return [SlotId(int(piece.groups[-1][0])) for piece in pieces]  # the recurrent group is the last


def _lengths(forward: Forward) -> mx.array | None:
    """Each row's number of tokens, `[rows]`; None when no row is padded."""
    lengths = [piece.n_tokens for piece in forward.pieces]
    return mx.array(lengths) if min(lengths) < forward.length else None
