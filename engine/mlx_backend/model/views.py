"""The views that an unmodified mlx-lm model is given in place of its own caches.

A view has the methods of mlx-lm's caches that a model calls during a forward, and is backed by the
arena. It lives no longer than the forward, because it refers to the arena's arrays (see
`kv/arena.py`).
"""

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models import base
from mlx_lm.models.cache import ArraysCache

from engine.mlx_backend.kv.arena import LayerArena
from engine.mlx_backend.kv.layout import (
    ChunkedCacheSpec,
    CompressedSpecs,
    KVCacheSpec,
    Layout,
    SpecTree,
    StateSpec,
    UnusedSpec,
)
from engine.mlx_backend.kv.storage import Storage
from engine.mlx_backend.model.attention import Attention, BlockAttention
from engine.mlx_backend.model.batching import Batching, ForwardBatch
from engine.mlx_backend.model.compressed import (
    CompressedRows,
    CompressedView,
    Part,
    install_compressed,
)
from engine.mlx_backend.model.images import ImageInputs
from engine.mlx_backend.model.rows import ArenaForward, RowGroup, TokenSpan, wholes
from kvstore.types import SlotId
from kvstore.window import first_needed

_model_attention: Callable[..., mx.array] = base.scaled_dot_product_attention


class UnusedView:
    """A cache that the model never writes: it has positions and masks, and nothing else."""

    def __init__(self, forward: ArenaForward, window: int | None = None) -> None:
        self.forward = forward
        self.offset = forward.offset
        self._window = window

    def make_mask(
        self, length: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """The attention mask of this forward, in mlx-lm's terms; see `create_attention_mask`."""
        window = window_size or self._window
        forward = self.forward
        if forward.is_lone and not (return_array or window or forward.looks_ahead):
            return None if length == 1 else "causal"
        return self.forward.mask(window)


class LayerView(UnusedView):
    """One layer's K and V, for one forward.

    `offset`: `[rows]`, the position of each row's next token. `keys` and `values` are set by
    `update_and_fetch`; a model may read and replace them, with no effect on what is stored.
    """

    def __init__(
        self,
        layer: LayerArena,
        forward: ArenaForward,
        window: int | None,
        attentions: Sequence[BlockAttention | None],
        unread: Collection[int] = (),
    ) -> None:
        """`attentions`: of each row group; None: the model's own computes it. `unread`: indices of
        the groups whose attention is not needed, because nothing after it is stored or read.
        """
        super().__init__(forward, window)
        self.layer = layer
        self.fetched: tuple[mx.array, mx.array] | None = None
        self._stored: tuple[mx.array, mx.array] | None = None  # K and V as they are stored
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self._attentions = attentions
        self._unread = unread

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write the new tokens' K and V. Returns the arrays that the model passes on to attention:
        all keys and values of its rows, `[rows, kv_heads, keys, dim]`, or the new ones alone, which
        then stand in for all.
        """
        forward, heads = self.forward, self.layer.heads
        if (cleared := forward.cleared(heads)) is not None:
            self.layer.clear(cleared)
        self.layer.write(forward.slot_mapping(heads), keys, values)
        self.offset = forward.offset_after
        self.fetched = keys, values
        if not forward.stands_in:
            stored_keys, stored_values = self._stored = self._gathered(forward.groups[0])
            # Lazy: rotated back only for a model that reads keys itself.
            self.fetched = self.layer.rotated(stored_keys), stored_values
        self.keys, self.values = self.fetched
        return self.fetched

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """What `update_and_fetch` returned, for models whose layers share one layer's KV."""
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
    ) -> mx.array:
        """mlx-lm's `scaled_dot_product_attention`, to the keys that this view holds.

        Raises ValueError where K, V or the mask stood in and the model has changed them.
        """
        forward, groups = self.forward, self.forward.groups
        is_own = self.fetched is not None and keys is self.fetched[0] and values is self.fetched[1]
        if is_own:
            queries = self.layer.rotated(queries)
        if not forward.stands_in:
            if is_own and self._is_causal(mask):
                output = self._attend_blocks(0, queries, scale, self._window, sinks)
                if output is not None:
                    return output
            if is_own and self._stored is not None:
                keys, values = self._stored
            if mask is None and forward.length == 1 and not forward.is_lone:
                mask = forward.mask(self._window)  # the model asks for none, but there is padding
            return _model_attention(
                queries, keys, values, cache=self, scale=scale, mask=mask, sinks=sinks
            )
        if not is_own:
            raise ValueError("the model changes what its cache gives it before it attends")
        window = forward.window_of(mask) or self._window
        if len(groups) == 1:
            return self._attend_group(0, queries, scale, window, sinks)
        outputs, heads, key_dim = [], queries.shape[1], queries.shape[3]
        for index, group in enumerate(groups):
            first, last = forward.bounds[index : index + 2]
            shape = group.rows, group.length, heads, key_dim
            by_row = queries[first:last].reshape(shape).swapaxes(1, 2)
            output = self._attend_group(index, by_row, scale, window, sinks)
            outputs.append(output.swapaxes(1, 2).reshape(last - first, heads, 1, -1))
        return mx.concatenate(outputs)

    def _is_causal(self, mask: mx.array | str | None) -> bool:
        """Whether a mask is the one of this layer's attention in this forward."""
        if mask is None:
            return self.forward.length == 1  # a lone token sees all keys
        if isinstance(mask, str):
            return self.forward.is_lone and mask == "causal" and self._window is None
        return mask is self.forward.mask(self._window)

    def _attend_blocks(
        self,
        index: int,
        queries: mx.array,
        scale: float,
        window: int | None,
        sinks: mx.array | None,
    ) -> mx.array | None:
        """Attention of one group to its blocks. None where the model's own is to compute it."""
        self.layer.query_heads = queries.shape[1]
        attention = self._attentions[index]
        if attention is None:
            return None
        return attention.attend(queries, self.layer, scale, window, sinks)

    def _attend_group(
        self,
        index: int,
        queries: mx.array,
        scale: float,
        window: int | None,
        sinks: mx.array | None,
    ) -> mx.array:
        """Attention of one group, `[rows, heads, length, value_dim]`, where K and V stood in. The
        queries are rotated as the stored keys are.
        """
        if index in self._unread:
            return mx.zeros((*queries.shape[:3], self.layer.shape.value_dim), queries.dtype)
        if (found := self._attend_blocks(index, queries, scale, window, sinks)) is not None:
            return found
        group = self.forward.groups[index]
        if group.is_lone and window is None and not group.looks_ahead:
            mask: mx.array | str | None = None if group.length == 1 else "causal"
        else:
            mask = group.mask(window)
        keys, values = self._gathered(group)
        return _model_attention(
            queries, keys, values, cache=self, scale=scale, mask=mask, sinks=sinks
        )

    def _gathered(self, group: RowGroup) -> tuple[mx.array, mx.array]:
        """A group's K and V as stored. It is lazy: nothing is read unless it is used."""
        keys, values = self.layer.read(group.gather_ids(self.layer.heads))
        if group.is_lone:
            return keys[:, :, : group.n_keys], values[:, :, : group.n_keys]
        return keys, values


class ChunkedView(LayerView):
    """A layer of chunked attention, of one row; the model makes the mask from positions."""

    @property
    def start_position(self) -> int:
        """The position of the first key."""
        return int(self.forward.groups[0].first_positions[0])

    def maybe_trim_front(self) -> None:
        """Does nothing: keys that no token sees any more are not among the row's blocks."""


class StateView(ArraysCache):  # type: ignore[misc]  # a base class without types
    """A recurrent layer's state of several rows; the model replaces the arrays in `cache`.

    The layer reads them only when those of the layer `before` have been replaced. Without that
    order MLX would compute the state of each layer last, and keep what it is made of: as many bytes
    as all states together.
    """

    cache: list[Any]

    def __init__(
        self,
        arrays: Sequence[mx.array | None],
        lengths: mx.array | None,
        before: "StateView | None" = None,
    ) -> None:
        super().__init__(len(arrays))
        self.cache = list(arrays)
        self.lengths = lengths
        self._before = before

    def __getitem__(self, index: int) -> Any:
        before, self._before = self._before, None
        if before is not None:
            replaced = [array for array in before.cache if array is not None]
            own = [array for array in self.cache if array is not None]
            if replaced and own:
                ordered = iter(mx.depends(own, replaced))
                self.cache = [None if array is None else next(ordered) for array in self.cache]
        return self.cache[index]

    def advance(self, N: int) -> None:  # noqa: N803 - as mlx-lm has it
        """Rebinds `lengths`, which all layers share; mlx-lm's own changes the array."""
        if self.lengths is not None:
            self.lengths = self.lengths - N


def scaled_dot_product_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: object,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None = None,
) -> mx.array:
    """mlx-lm's function of that name, which leaves it to the cache where that is one of ours."""
    if isinstance(cache, LayerView):
        return cache.attend(queries, keys, values, scale, mask, sinks)
    return _model_attention(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)


def install_attention(model: Module) -> None:
    """Let the modules that this model's layers come from call the function above.

    Stateless and idempotent. With caches other than ours a model computes what it did before.
    """
    for name in {type(module).__module__ for _, module in model.named_modules()}:
        namespace = vars(sys.modules[name])
        if namespace.get("scaled_dot_product_attention") is _model_attention:
            namespace["scaled_dot_product_attention"] = scaled_dot_product_attention
    install_compressed(model)


ViewTree: TypeAlias = "UnusedView | StateView | CompressedView | tuple[ViewTree, ...]"
"""One view, or those of a layer that keeps several caches."""


class ForwardViews:
    """One forward's views, in the shape in which the model keeps its caches.

    `trees`: one for each cache that the model is given. `kv_layers`: the layers that are written,
    in the order of the model's.
    """

    def __init__(
        self,
        layout: Layout,
        forwards: Mapping[int | None, ArenaForward],
        attentions: Mapping[int | None, Sequence[BlockAttention | None]],
        states: Sequence[mx.array | None],
        lengths: mx.array | None = None,
        unread: Collection[int] = (),
    ) -> None:
        """`forwards`: in each arena, by window; None is full attention. `attentions`: of the groups
        in each arena. `states`: the arrays of the recurrent layers, in order.
        `lengths`: each row's number of tokens, `[rows]`; None when no row is padded. `unread`: see
        `LayerView`; of the last layer that keeps K and V.
        """
        self._forwards = forwards
        self._layers = {window: iter(own.arena.layers) for window, own in forwards.items()}
        self._attentions = attentions
        self._states = iter(states)
        self._lengths = lengths
        self._unread = unread
        self._n_layers = len(layout.kv_layers)
        self._state_views = list[StateView]()
        self._compressed: CompressedRows | None = None
        self.kv_layers = list[LayerArena]()
        self.trees: list[ViewTree] = [self._view(spec) for spec in layout.caches]

    def states(self) -> list[mx.array]:
        """The arrays that the model has left in its recurrent layers' views."""
        return [array for view in self._state_views for array in view.cache]

    def _next_layer(self, spec: KVCacheSpec) -> LayerArena:
        layer = next(self._layers[spec.window])
        self.kv_layers.append(layer)
        return layer

    def _compressed_view(self, specs: CompressedSpecs) -> CompressedView:
        if self._compressed is None:
            self._compressed = CompressedRows(self._forwards[None])
        parts = [Part(spec, self._next_layer(spec), self._forwards[spec.window]) for spec in specs]
        return CompressedView(self._compressed, *parts)

    def _view(self, spec: SpecTree) -> ViewTree:
        if isinstance(spec, CompressedSpecs):
            return self._compressed_view(spec)
        if isinstance(spec, tuple):
            return tuple(map(self._view, spec))
        if isinstance(spec, StateSpec):
            arrays = [next(self._states) for _ in spec.arrays]
            before = self._state_views[-1] if self._state_views else None
            view = StateView(arrays, self._lengths, before)
            self._state_views.append(view)
            return view
        if isinstance(spec, UnusedSpec):
            return UnusedView(self._forwards[None])
        forward, layer = self._forwards[spec.window], self._next_layer(spec)
        if isinstance(spec, ChunkedCacheSpec):
            return ChunkedView(layer, forward, None, [None] * len(forward.groups))
        unread = self._unread if len(self.kv_layers) == self._n_layers else ()
        return LayerView(layer, forward, spec.window, self._attentions[spec.window], unread)


def views_of(
    storage: Storage,
    layout: Layout,
    attention: Attention,
    batching: Batching,
    batch: ForwardBatch,
    images: ImageInputs | None = None,
) -> ForwardViews:
    """The views of a batch's forward. Raises ValueError where its rows cannot share one."""
    causal_in_full = images is not None and images.windows_only

    def forward(groups: Sequence[RowGroup]) -> ArenaForward:
        return ArenaForward(
            groups, batching.stands_in, batching.masks_by_head, batching.int_offsets
        )

    full = [
        RowGroup(spans, storage.full, () if causal_in_full else wholes(spans))
        for spans in batch.row_groups
    ]
    forwards: dict[int | None, ArenaForward] = {None: forward(full)}
    for index, (window, arena) in enumerate(zip(layout.windows, storage.windows, strict=True)):
        forwards[window] = forward(
            [
                RowGroup(
                    [_windowed(span, index, window, arena.block_size) for span in spans],
                    arena,
                    wholes(spans),
                )
                for spans in batch.row_groups
            ]
        )
    attentions = {
        window: [
            attention.prepare(group, window)
            if own.arena.is_attended and not group.looks_ahead
            else None
            for group in own.groups
        ]
        for window, own in forwards.items()
    }
    spans = batch.row_groups[0]
    states: Sequence[mx.array | None] = ()
    if layout.states:
        if len(full) > 1:
            raise ValueError("its states take no rows of unlike length in one forward")
        if batching.starts_empty and spans[0].start == 0:
            states = [None] * len(layout.states)
        else:
            states = storage.states.read(state_slots(spans))
    counts = [span.n_tokens for span in spans]
    lengths = mx.array(counts) if min(counts) < full[0].length else None
    return ForwardViews(layout, forwards, attentions, states, lengths, batch.unread)


def state_slots(spans: Sequence[TokenSpan]) -> list[SlotId]:
    """The slots of rows' recurrent states."""
    return [SlotId(int(span.slots(-1)[0])) for span in spans]  # the recurrent group is the last


def _windowed(span: TokenSpan, group: int, window: int, block_size: int) -> TokenSpan:
    """The span over a window's blocks, from the first with a key that a token sees."""
    first = first_needed(span.start, window, block_size)
    return replace(span, blocks=span.slots(group)[first:], first_block=first)
