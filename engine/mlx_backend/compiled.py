"""Compiled decode: a steady decode step as one `mx.compile` function, replayed while rows stay.

A step in which each row decodes one token has the same graph each time, as long as as many rows
read block tables of the same width. The graph is traced once for each such shape and replayed: MLX
then runs no Python for it, fuses what is elementwise, and computes equal parts once. The model is
mlx-lm's, unchanged: it is called while tracing, with views over the traced arrays.

The batch lives on the device (`DecodeBatch`): positions advance there, and block tables are patched
where a row begins a block. The pools of the arenas and the recurrent states are inputs and outputs
of the function, so that MLX writes to them in place.

What else a step may do (prompts, drafts, storage ops) takes the eager path of `cached_model.py`,
which is also what the compiled one is checked against at load (`loading/decode_check.py`).
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple, TypeAlias

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from engine.mlx_backend.batch import BatchRow
from engine.mlx_backend.cpu.blocks import HIDDEN, BlockReads, decode_attention
from engine.mlx_backend.cpu.cascade import CascadeAttention
from engine.mlx_backend.errors import one_line
from engine.mlx_backend.model.adapters import NO_ADAPTER
from engine.mlx_backend.model.cache_views import CacheView, StateView, UnusedView
from engine.mlx_backend.model.cached_model import CachedModel
from engine.mlx_backend.model.forward import (
    BlockTable,
    Forward,
    GroupedMaskForward,
    LoneForward,
    table_width,
)
from engine.mlx_backend.model.layout import ChunkedCacheSpec, SpecTree, StateSpec, UnusedSpec
from engine.mlx_backend.model.linear import TransposedWeights
from engine.mlx_backend.model.rope import shared_tables
from engine.mlx_backend.model.view_tree import ViewTree
from engine.mlx_backend.storage.arena import Arena, LayerArena
from kvstore.types import SlotId
from kvstore.window import first_needed

MOST_TRACES = 64
"""Traces that are kept. One of a model with 48 layers takes about 4.5 MB."""

WANTED_STEPS = 4
"""A shape is traced when it has been wanted for so many steps: a trace takes about as long as these
steps save, and rows that come and go leave many shapes at once.
"""

LEAST_WIDTH = 4
"""Tables are as wide as a multiple of so many blocks, or wider steps: see `width_bucket`."""

PADDING_BLOCKS = 128
"""Blocks of padding, over all rows, that a step may read in vain, beyond an eighth of its own.

The eager path takes one more pass for each 64 of them (`cpu/cascade.py`), which costs as much.
"""


def row_bucket(n_rows: int) -> int:
    """The least power of two, or three times one, that is not below `n_rows`."""
    power = 1 << (n_rows - 1).bit_length()
    return power * 3 // 4 if n_rows <= power * 3 // 4 else power


def width_bucket(n_blocks: int) -> int:
    """The least width that is not below `n_blocks`: multiples of 4, then eight in each octave.

    A row of 32-token blocks has at least 128 steps in each.
    """
    return -(-table_width(n_blocks) // LEAST_WIDTH) * LEAST_WIDTH


class GroupTables(NamedTuple):
    """An arena, and which of a sequence's tables its blocks stand in."""

    arena: Arena
    group: int | None  # None: full attention
    window: int | None

    def first(self, position: int) -> int:
        """The entry that holds the first token which the token at a position sees."""
        if self.window is None:
            return 0
        return first_needed(position, self.window, self.arena.block_size)

    def n_blocks(self, position: int) -> int:
        """How many blocks the token at a position sees."""
        return position // self.arena.block_size + 1 - self.first(position)

    def line(self, row: BatchRow) -> npt.NDArray[np.uint32]:
        """The blocks that the next token of a row sees, its own the last."""
        ids = row.tables.ids(self.group)
        return ids[self.first(row.position) : row.position // self.arena.block_size + 1]


class DecodeBatch:
    """Rows that decode one token each, as arrays on the device.

    Each array has a line for each of `size` rows. Lines beyond the last of `rows` are padding: they
    compute position 0 of the scratch block again and again. `tables`: for each arena
    `[size, width]`, padded with its blank block; `first_keys`: for each arena the position of a
    row's first key, `[size]`. `positions`: of the tokens to compute; `advance`: how far a step
    moves them. Both int32 `[size]`. `begun`: for each arena the blocks that the tokens begin.
    `full_table` and `n_blocks`: as of the beginning, the rows' blocks of full attention on the
    host, padded, and how many they are.
    """

    full_table: BlockTable
    n_blocks: int

    def __init__(self, rows: Sequence[BatchRow], size: int, groups: Sequence[GroupTables]) -> None:
        self.rows = list(rows)
        self.size = size
        self._groups = groups
        self._next = [row.position for row in rows]
        self._versions = [row.tables.version for row in rows]
        self.positions = mx.array(self._padded(self._next))
        self.advance = mx.array(self._padded([1] * len(rows)))
        self.tables = list[mx.array]()
        self.first_keys = list[mx.array]()
        self.adapters: mx.array | None = None  # [size], as `RowAdapters.using` takes them
        for group in groups:
            lines = [group.line(row) for row in rows]
            width = width_bucket(max(map(len, lines)))
            padding = [np.array([group.arena.scratch], np.uint32)] * (size - len(rows))
            table = _table([*lines, *padding], width, group.arena.blank)
            if group.window is None:
                self.full_table, self.n_blocks = table[: len(rows)], sum(map(len, lines))
            self.tables.append(mx.array(table))
            self.first_keys.append(self._first_keys(group))
        self.begun = self._begun()

    @property
    def widths(self) -> tuple[int, ...]:
        """Of each arena's tables, in blocks."""
        return tuple(table.shape[1] for table in self.tables)

    def widths_ahead(self) -> tuple[int, ...]:
        """What `widths` will be half a block later."""
        ahead = self._block_size // 2
        return tuple(
            max(width, width_bucket(max(group.n_blocks(row + ahead) for row in self._next)))
            for group, width in zip(self._groups, self.widths, strict=True)
        )

    def follows(self, rows: Sequence[BatchRow]) -> bool:
        """Bring the tables up to date. False where the rows are not the same, each one token on
        from where a step has left it, or where one has outgrown the width of its table.
        """
        if len(rows) != len(self.rows) or any(map(_is_not, rows, self.rows)):
            return False
        if [row.position for row in rows] != self._next:
            return False
        self.begun = self._begun()
        changed = [
            index
            for index, (row, version) in enumerate(zip(rows, self._versions, strict=True))
            if row.tables.version != version or not row.position % self._block_size
        ]
        return not changed or self._patch(changed)

    def move(self, positions: mx.array) -> None:
        """The rows' tokens are computed: the next ones stand at `positions`."""
        self.positions = positions
        for index, row in enumerate(self.rows):
            row.position += 1
            self._next[index] = row.position

    @property
    def _block_size(self) -> int:
        return self._groups[0].arena.block_size

    def _patch(self, changed: Sequence[int]) -> bool:
        at = mx.array(list(changed), mx.uint32)
        for index, group in enumerate(self._groups):
            lines = [group.line(self.rows[row]) for row in changed]
            width = self.tables[index].shape[1]
            if max(map(len, lines)) > width:
                return False
            # A new array: what has been built may still read the old one.
            patched = mx.array(self.tables[index])
            patched[at] = mx.array(_table(lines, width, group.arena.blank))
            self.tables[index] = patched
            if group.window is not None:
                self.first_keys[index] = self._first_keys(group)
        for row in changed:
            self._versions[row] = self.rows[row].tables.version
        return True

    def _begun(self) -> list[list[int]]:
        begun = [row for row in self.rows if not row.position % self._block_size]
        return [[int(group.line(row)[-1]) for row in begun] for group in self._groups]

    def _first_keys(self, group: GroupTables) -> mx.array:
        size = group.arena.block_size
        return mx.array(self._padded([group.first(row.position) * size for row in self.rows]))

    def _padded(self, numbers: Sequence[int]) -> npt.NDArray[np.int32]:
        return np.array([*numbers, *[0] * (self.size - len(numbers))], np.int32)


def _is_not(one: BatchRow, other: BatchRow) -> bool:
    return one is not other


def _table(
    lines: Sequence[npt.NDArray[np.uint32]], width: int, blank: int
) -> npt.NDArray[np.uint32]:
    table = np.full((len(lines), width), blank, np.uint32)
    for row, line in enumerate(lines):
        table[row, : len(line)] = line
    return table


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


class Unfit(Exception):
    """Why a model's steps cannot be compiled, in a few words."""


Shape: TypeAlias = tuple[int, tuple[int, ...], bool]
"""Of a step: its lines, the widths of its tables, and whether any row takes an adapter."""

Outputs: TypeAlias = tuple[mx.array, mx.array, list[mx.array], list[mx.array]]
"""Logits `[lines, vocabulary]`, the next positions, the pools, the states."""


class CompiledDecode:
    """Computes the forwards of steady steps, by functions that are traced once for each shape.

    `steps` counts steps: "" are those that were compiled, the others are eager and say why. Belongs
    to the thread that made it, as all MLX arrays do.
    """

    def __init__(self, model: CachedModel, wanted_steps: int = WANTED_STEPS) -> None:
        """`wanted_steps`: how often a shape must come before it is traced. Raises Unfit for a model
        whose steps cannot be traced.
        """
        layout, storage = model.layout, model.storage
        if model.execution.batching.forward is LoneForward:
            raise Unfit("its positions are Python numbers")
        if any(isinstance(spec, ChunkedCacheSpec) for spec in layout.specs):
            raise Unfit("it attends to chunks")
        self._model = model
        self._wanted_steps = wanted_steps
        self._groups = [
            GroupTables(storage.full, None, None),
            *(
                GroupTables(arena, index, window)
                for index, (window, arena) in enumerate(
                    zip(layout.windows, storage.windows, strict=True)
                )
            ),
        ]
        self._layers = [layer for group in self._groups for layer in group.arena.layers]
        self._reads_blocks = isinstance(model.execution.attention, CascadeAttention)
        self._weights = TransposedWeights(model.model)
        self._traces = OrderedDict[Shape, Callable[..., Outputs]]()
        self._wanted = Counter[Shape]()
        self._batch: DecodeBatch | None = None
        self._clear = mx.compile(self._cleared)
        self.problem = ""  # why no step is compiled any more
        self.steps = Counter[str]()

    def forward(
        self, rows: Sequence[BatchRow], tokens: Callable[[int], mx.array]
    ) -> mx.array | None:
        """Logits of one token of each row, `[lines, vocabulary]`, whose first lines are the rows';
        None where the eager path is to compute them. `tokens(lines)`: uint32 `[lines]`, the tokens.
        """
        try:
            logits, reason = self._forward(rows, tokens)
        except Exception as error:  # a model may raise anything while it is traced
            self.give_up(error)
            logits, reason = None, self.problem
        self.steps[reason] += 1
        if logits is None:
            self._batch = None
        return logits

    def give_up(self, error: Exception) -> None:
        """A compiled step has failed: there will be no others."""
        self.problem = f"{type(error).__name__}: {one_line(error)}"
        self._batch = None
        self._traces.clear()

    def trace_ahead(self) -> None:
        """Trace the shape that the rows of the latest step grow into, if that is near."""
        if (batch := self._batch) is None or self.problem:
            return
        widths = batch.widths_ahead()
        if widths == batch.widths:
            return
        shape = batch.size, widths, self._adapters(batch) is not None
        if shape not in self._traces:
            with suppress(Exception):  # it is reported when the shape is needed
                self._traces[shape] = trace = self._new_trace(shape)
                tables = [mx.zeros((batch.size, width), mx.uint32) for width in widths]
                tokens = mx.zeros(batch.size, mx.uint32)
                self._call(trace, batch, tokens, tables)

    def _forward(
        self, rows: Sequence[BatchRow], tokens: Callable[[int], mx.array]
    ) -> tuple[mx.array | None, str]:
        if self.problem:
            return None, self.problem
        batch = self._batch
        if batch is None or not batch.follows(rows):
            lines = len(rows) if self._model.layout.states else row_bucket(len(rows))
            batch = DecodeBatch(rows, lines, self._groups)
            if reason := self._unfit(batch):
                return None, reason
            self._batch = batch
        adapters = self._adapters(batch)
        shape = batch.size, batch.widths, adapters is not None
        if (trace := self._trace(shape)) is None:
            return None, "a shape that is new"
        if any(batch.begun):
            self._clear_begun(batch.begun)
        logits, positions, pools, states = self._call(
            trace, batch, tokens(batch.size), batch.tables
        )
        self._put_pools(pools)
        batch.move(positions)
        if slots := self._slots(batch):
            self._model.storage.states.write(slots, states)
        return logits, ""

    def _call(
        self,
        trace: Callable[..., Outputs],
        batch: DecodeBatch,
        tokens: mx.array,
        tables: list[mx.array],
    ) -> Outputs:
        slots, adapters = self._slots(batch), self._adapters(batch)
        return trace(
            tokens,
            batch.positions,
            batch.advance,
            tables,
            batch.first_keys,
            [] if adapters is None else [adapters],
            self._pools(),
            self._model.storage.states.read(slots) if slots else [],
        )

    def _unfit(self, batch: DecodeBatch) -> str:
        """Why a batch is better computed eagerly; "" if it is not."""
        attention = self._model.execution.attention
        width = batch.widths[0]
        padding = batch.size * width - batch.n_blocks
        spare: float = PADDING_BLOCKS
        if not self._reads_blocks:
            block_size = self._groups[0].arena.block_size
            if len(batch.rows) > 1 and batch.size * width * block_size > self._model.most_keys:
                return "too many keys for one forward"
            spare = attention.padding_keys / block_size
        if len(batch.rows) > 1 and padding > spare + batch.n_blocks // 8:
            return "rows of unlike lengths"
        if isinstance(attention, CascadeAttention) and attention.shares(batch.full_table):
            return "rows share a long prefix"
        return ""

    def _adapters(self, batch: DecodeBatch) -> mx.array | None:
        """Which adapter each line takes, `[lines]`; None where no row takes any."""
        if batch.adapters is None:
            names = [row.tables.adapter for row in batch.rows]
            names += [NO_ADAPTER] * (batch.size - len(names))
            batch.adapters = self._model.execution.adapters.indices_of(names)
        return batch.adapters

    def _slots(self, batch: DecodeBatch) -> list[SlotId]:
        """Of the rows' recurrent states."""
        if not self._model.layout.states:
            return []
        return [SlotId(int(row.tables.ids(-1)[0])) for row in batch.rows]

    def _trace(self, shape: Shape) -> Callable[..., Outputs] | None:
        """The function of a shape. None while it has not been wanted often enough."""
        trace = self._traces.get(shape)
        if trace is None:
            self._wanted[shape] += 1
            if self._wanted[shape] < self._wanted_steps:
                return None
            trace = self._traces[shape] = self._new_trace(shape)
            while len(self._traces) > MOST_TRACES:
                self._traces.popitem(last=False)  # MLX's own cache of it goes with it
        self._traces.move_to_end(shape)
        return trace

    def _new_trace(self, shape: Shape) -> Callable[..., Outputs]:
        lines, widths, _ = shape
        model, full = self._model, self._groups[0].arena
        masks_by_kv_head = model.execution.batching.forward is GroupedMaskForward
        index = BlockIndex(lines, widths[0], full) if self._reads_blocks and full.layers else None

        def step(
            tokens: mx.array,
            positions: mx.array,
            advance: mx.array,
            tables: list[mx.array],
            first_keys: list[mx.array],
            adapters: list[mx.array],
            pools: list[mx.array],
            states: list[mx.array],
        ) -> Outputs:
            with self._holding(pools):
                forwards = [
                    DecodeForward(
                        group.arena,
                        table,
                        positions,
                        None if group.window is None else firsts,
                        masks_by_kv_head,
                    )
                    for group, table, firsts in zip(self._groups, tables, first_keys, strict=True)
                ]
                views = StepViews(self._groups, forwards, states, index)
                caches = [views.view(spec) for spec in model.layout.caches]
                adapted = model.execution.adapters.using(adapters[0] if adapters else None)
                with shared_tables(), self._weights.used(lines), adapted:
                    ids = tokens.astype(mx.int32)[:, None]
                    logits: mx.array = model.model(ids, cache=caches)
                if index is not None:
                    index.forget()
                logits = logits.reshape(lines, -1)
                return logits, positions + advance, self._pools(), views.states()

        return mx.compile(step)

    def _clear_begun(self, begun: Sequence[Sequence[int]]) -> None:
        """Zero the blocks that the rows begin: what they held may be no number."""
        most = 1 << (len(begun[0]) - 1).bit_length()
        blocks = [
            mx.array([*ids, *[group.arena.scratch] * (most - len(ids))], mx.uint32)
            for group, ids in zip(self._groups, begun, strict=True)
        ]
        self._put_pools(self._clear(self._pools(), blocks))  # no name is bound to the pools

    def _cleared(self, pools: list[mx.array], blocks: list[mx.array]) -> list[mx.array]:
        with self._holding(pools):
            for group, ids in zip(self._groups, blocks, strict=True):
                group.arena.clear(ids)
            return self._pools()

    def _pools(self) -> list[mx.array]:
        return [pool for layer in self._layers for pool in layer.arrays() if pool.size]

    def _put_pools(self, pools: list[mx.array]) -> None:
        """Move these into the arenas: MLX would copy a pool that anybody else refers to."""
        pools.reverse()
        for layer in self._layers:
            layer.put_arrays([pools.pop() if pool.size else pool for pool in layer.arrays()])

    @contextmanager
    def _holding(self, pools: list[mx.array]) -> Iterator[None]:
        """Meanwhile the arenas hold traced arrays."""
        before = [layer.arrays() for layer in self._layers]
        self._put_pools(pools)
        try:
            yield
        finally:
            for layer, arrays in zip(self._layers, before, strict=True):
                layer.put_arrays(arrays)


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
