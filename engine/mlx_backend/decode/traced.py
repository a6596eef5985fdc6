"""What a model sees while its decode step is traced: views over arrays without values."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from engine.mlx_backend.cpu.cascade import HIDDEN, BlockReads, decode_attention
from engine.mlx_backend.decode.batch import GroupTables
from engine.mlx_backend.kv.arena import Arena, LayerArena
from engine.mlx_backend.model.forward import Forward
from engine.mlx_backend.model.layout import SpecTree, StateSpec, UnusedSpec
from engine.mlx_backend.model.views import CacheView, StateView, UnusedView, ViewTree


class DecodeForward(Forward):
    """One token of each row, whose positions and block table are arrays on the device.

    `first_keys`, `[rows]`: the position of a row's first key; None: 0 for all. `masks_by_kv_head`:
    as `GroupedMaskForward`.
    """

    def __init__(
        self,
        arena: Arena,
        table: mx.array,
        positions: mx.array,
        first_keys: mx.array | None,
        masks_by_kv_head: bool,
    ) -> None:
        self.rows, n_blocks = table.shape
        self.length = 1
        self.is_lone = False
        self.starts = self.offset = positions
        self.offset_after = positions + 1
        self.n_keys = n_blocks * arena.block_size
        self.table_on_device = table
        self._first_keys = first_keys
        self._masks_by_kv_head = masks_by_kv_head
        self._arena = arena
        held = positions if first_keys is None else positions - first_keys
        entries = (held // arena.block_size)[:, None]
        self._blocks = mx.take_along_axis(table, entries, axis=1)[:, 0]
        self._slots = (held % arena.block_size).astype(mx.uint32)
        self._begun = []
        self._slot_mappings = {}
        self._cleared = {}
        self._heads = {}
        self._masks = {}

    def heads(self, kv_heads: int) -> mx.array:
        if kv_heads not in self._heads:
            self._heads[kv_heads] = self._arena.head_ids(self.table_on_device, kv_heads)
        return self._heads[kv_heads]

    def _make_mask(self, window: int | None) -> mx.array:
        queries = self.starts[:, None, None, None]
        keys = mx.arange(self.n_keys)
        if self._first_keys is not None:
            keys = keys + self._first_keys[:, None, None, None]
        mask = keys <= queries
        mask = mask if window is None else mask & (keys > queries - window)
        return mask[:, :, None] if self._masks_by_kv_head else mask


class DecodeView(CacheView):
    """A layer in a compiled step. Its mask is always an array, for tables have padding."""

    forward: DecodeForward

    def __init__(
        self,
        layer: LayerArena,
        forward: DecodeForward,
        window: int | None,
        reads: "BlockIndex | None",
    ) -> None:
        """`reads`: for attention that reads blocks without gathering them."""
        super().__init__(layer, forward)
        self._window = window
        self._reads = reads

    def make_mask(
        self, length: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        return self.forward.mask(window_size or self._window)

    def whole_mask(self, mask: mx.array | str | None) -> mx.array | str | None:
        """A model that passes no mask for a lone token means all keys that there are."""
        return self.forward.mask(self._window) if mask is None else mask

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: mx.array | str | None,
        sinks: mx.array | None = None,
    ) -> mx.array | None:
        """See `KVView.attend`. `queries`: `[rows, heads, 1, key_dim]`."""
        if self._reads is None or not self.is_causal_attention(
            keys, values, self.whole_mask(mask), sinks
        ):
            return None
        where = self._reads.of(self.forward, self.layer)
        return decode_attention(queries * scale, self.layer, where)


class BlockIndex:
    """The index arrays of attention to the blocks of a table, for a traced step.

    What does not depend on the table is evaluated before the trace, of which it is a constant.
    """

    def __init__(self, rows: int, width: int, arena: Arena) -> None:
        self._constant = dict[int, tuple[mx.array, mx.array]]()
        for heads in {layer.shape.kv_heads for layer in arena.layers}:
            shape = (rows, width, heads)
            queries = np.arange(rows * heads, dtype=np.uint32).reshape(rows, 1, heads)
            tiles = np.arange(rows * width * heads, dtype=np.uint32).reshape(shape)
            whole = np.ascontiguousarray(np.broadcast_to(queries, shape))
            self._constant[heads] = mx.array(whole), mx.array(tiles)
        size = arena.block_size
        self._keys = mx.array(np.arange(width * size, dtype=np.int32).reshape(width, 1, 1, size))
        mx.eval(self._constant, self._keys)
        self._traced = dict[int, BlockReads]()
        self._bias: mx.array | None = None

    def of(self, forward: DecodeForward, layer: LayerArena) -> BlockReads:
        heads = layer.shape.kv_heads
        if self._bias is None:
            last = forward.starts[:, None, None, None, None]
            self._bias = mx.where(self._keys <= last, 0.0, HIDDEN)
        if heads not in self._traced:
            queries, tiles = self._constant[heads]
            blocks = mx.contiguous(forward.heads(heads).swapaxes(1, 2))
            self._traced[heads] = BlockReads(queries, blocks, tiles, self._bias)
        return self._traced[heads]

    def forget(self) -> None:
        """Keep no array of the trace."""
        self._traced.clear()
        self._bias = None


class StepViews:
    """The views of a traced step, in the order of the layout's caches."""

    def __init__(
        self,
        groups: Sequence[GroupTables],
        forwards: Sequence[DecodeForward],
        states: Sequence[mx.array],
        index: BlockIndex | None,
    ) -> None:
        self._forwards = {
            group.window: (iter(group.arena.layers), forward)
            for group, forward in zip(groups, forwards, strict=True)
        }
        self._states = iter(states)
        self._state_views = list[StateView]()
        self._index = index

    def view(self, spec: SpecTree) -> ViewTree:
        """The next view of this kind."""
        match spec:
            case tuple():
                return [self.view(part) for part in spec]
            case StateSpec(arrays):
                view = StateView([next(self._states) for _ in arrays], None)
                self._state_views.append(view)
                return view
            case UnusedSpec():
                return UnusedView(self._forwards[None][1])
            case _:
                layers, forward = self._forwards[spec.window]
                index = self._index if spec.window is None else None
                return DecodeView(next(layers), forward, spec.window, index)

    def states(self) -> list[mx.array]:
        """What the model has left in the recurrent layers' views."""
        return [array for view in self._state_views for array in view.cache]
