"""The arrays of all groups of the store: an arena for each kind of block, and the states."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import TypeAlias

import mlx.core as mx
import numpy as np

from engine.core.step import StepPlan
from engine.mlx_backend.kv.arena import Arena, ArenaError, LayerShape, block_bytes
from engine.mlx_backend.kv.states import StateArena, StateShape, state_bytes
from engine.mlx_backend.model.layout import Layout
from kvstore.ops import (
    CopyBlock,
    CopyState,
    FillBlock,
    FillState,
    Parts,
    ReadBlock,
    ResetState,
    RollBackState,
    StorageOp,
)
from kvstore.sizes import StorageSizes
from kvstore.types import BlockId, SlotId

FORMAT = "kv1"

_WORDS = (mx.uint64, mx.uint32, mx.uint16, mx.uint8)

Form: TypeAlias = Sequence[tuple[tuple[int, ...], mx.Dtype]]
"""Shape and dtype of each array that something is made of."""


class Packed:
    """Equal things on their way to bytes, laid out and perhaps not yet computed.

    Each of `arrays` is `[things, ...]`.
    """

    def __init__(self, arrays: Iterable[mx.array], n_things: int) -> None:
        pieces = [mx.contiguous(array.reshape(n_things, -1)) for array in arrays if array.size]
        word = _widest([piece.nbytes // n_things for piece in pieces])
        pieces = [piece.view(word) for piece in pieces]
        self._joined = mx.concatenate(pieces, axis=1) if pieces else mx.zeros((n_things, 0), word)

    def arrays(self) -> list[mx.array]:
        """What must have been computed before `read`."""
        return [self._joined] if self._joined.size else []

    def read(self) -> list[memoryview]:
        """The bytes of each, where MLX has them: nothing is copied, and all of it stays in memory
        until all of them are let go. MLX finds such memory again, and it need not be touched anew.
        """
        rows = np.asarray(self._joined).view(np.uint8)
        return [memoryview(row).toreadonly() for row in rows]


def pack_blocks(arena: Arena, blocks: list[BlockId], n_tokens: list[int]) -> Packed:
    """The first tokens of blocks; the remaining slots of each block are zero.

    Refers to the arena's arrays until it has been computed: a write before that copies them.
    Raises ArenaError for an unknown block.
    """
    contents = arena.contents(blocks, n_tokens) if blocks else []
    return Packed((array for pair in contents for array in pair), len(blocks))


def fill_blocks(arena: Arena, contents: Mapping[BlockId, bytes | memoryview]) -> None:
    """Overwrite whole blocks. The bytes are copied while the device computes; then this waits until
    it is idle, and until they are in place.

    Raises ArenaError for an unknown block or another size, before anything is written.
    """
    if not contents:
        return
    form = _block_form(arena)
    for block, data in contents.items():
        arena.check(block)
        _check_size(data, form)
    runs = [
        (run[0], list(_unpack([contents[block] for block in run], form)))
        for run in _neighbours(contents)
    ]
    mx.synchronize()  # what is in flight may refer to the arena's arrays, and they would be copied
    for first, arrays in runs:
        for layer, keys, values in zip(arena.layers, arrays[::2], arrays[1::2], strict=True):
            layer.put_blocks(arena.place(first), keys, values)
    mx.eval(arena.planes())  # now: evaluated and still on their way they would be copied, too


def pack_states(states: StateArena, slots: Sequence[SlotId]) -> Packed:
    """The states that slots hold now."""
    return Packed(states.read(slots) if slots else [], len(slots))


def fill_state(states: StateArena, slot: SlotId, data: bytes | memoryview) -> None:
    """Let a slot hold a state. Raises ArenaError for another size."""
    form = [(shape.shape, shape.dtype) for shape in states.shapes]
    _check_size(data, form)
    states.write([slot], list(_unpack([data], form)))


def describe_layers(layers: Iterable[LayerShape]) -> str:
    """Equal neighbours once: `24*8x128float16+128float16` is 24 layers of 8 KV heads of K and V."""
    return ",".join(
        f"{len(list(run))}*{layer.kv_heads}x{layer.key_dim}{_name(layer.key_dtype)}"
        f"+{layer.value_dim}{_name(layer.value_dtype)}"
        for layer, run in groupby(layers)
    )


def describe_states(shapes: Iterable[StateShape]) -> str:
    """Equal neighbours once: `2*16x64float32` is two arrays of a state."""
    return ",".join(
        f"{len(list(run))}*{'x'.join(map(str, shape.shape))}{_name(shape.dtype)}"
        for shape, run in groupby(shapes)
    )


def _block_form(arena: Arena) -> Form:
    form = []
    for shape in (layer.shape for layer in arena.layers):
        room = (shape.kv_heads, arena.block_size)
        form.append(((*room, shape.key_dim), shape.key_dtype))
        form.append(((*room, shape.value_dim), shape.value_dtype))
    return form


def _neighbours(blocks: Iterable[BlockId]) -> Iterator[list[BlockId]]:
    """Runs of consecutive blocks. Each takes one operation a layer."""
    for _, run in groupby(enumerate(sorted(blocks)), lambda it: it[1] - it[0]):
        yield [block for _, block in run]


def _unpack(contents: Sequence[bytes | memoryview], form: Form) -> Iterator[mx.array]:
    """The arrays of equal things, each `[things, ...]`."""
    offset = 0
    for shape, dtype in form:
        end = offset + _bytes(shape, dtype)
        pieces = b"".join([memoryview(data)[offset:end] for data in contents])
        array = mx.array(np.frombuffer(pieces, np.uint8)) if pieces else mx.zeros(0, mx.uint8)
        yield array.view(dtype).reshape(len(contents), *shape)
        offset = end


def _check_size(data: bytes | memoryview, form: Form) -> None:
    expected = sum(_bytes(shape, dtype) for shape, dtype in form)
    if len(data) != expected:
        raise ArenaError(f"{len(data)} bytes to fill in where there are {expected}")


def _widest(sizes: Sequence[int]) -> mx.Dtype:
    """The widest integer that divides all sizes in bytes: joining 4 MiB of 8-byte integers takes
    0.3 ms, of single bytes 1.2 ms.
    """
    return next(word for word in _WORDS if not any(size % word.size for size in sizes))


def _bytes(shape: tuple[int, ...], dtype: mx.Dtype) -> int:
    return prod(shape) * dtype.size


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")


@dataclass(frozen=True, slots=True)
class Column:
    """One part, of the reads that ask for it; `readers` are their indices among all reads."""

    readers: Sequence[int]
    packed: Packed


class PendingReads:
    """`columns`: the block, each window's block, the state."""

    def __init__(self, n_reads: int, columns: Sequence[Column]) -> None:
        self._n_reads = n_reads
        self._columns = columns

    def arrays(self) -> list[mx.array]:
        """What must have been computed before `parts`."""
        return [array for column in self._columns for array in column.packed.arrays()]

    def parts(self) -> tuple[Parts, ...]:
        """The parts of each read."""
        return tuple(zip(*map(self._of_all, self._columns), strict=True))

    def _of_all(self, column: Column) -> Iterator[memoryview | None]:
        found = dict(zip(column.readers, column.packed.read(), strict=True))
        return map(found.get, range(self._n_reads))


NO_READS = PendingReads(0, ())


class Storage:
    """`full` holds logical blocks; `windows` and `states` are in the order of the store's groups.

    Layers of a kind that the model has none of take no memory. `kv_format` says how the bytes lie
    that `read` gives: two storages with the same take each other's. `part_bytes`: of a block, of
    each window's block, of a state.
    """

    def __init__(
        self,
        layout: Layout,
        sizes: StorageSizes,
        block_size: int,
        first_blocks: int | None = None,
    ) -> None:
        """`first_blocks`: see `Arena`; of the logical blocks alone."""
        self.full = Arena(layout.full_layers, sizes.n_blocks, block_size, first_blocks)
        self.windows = tuple(
            Arena(layout.layers_of(size.window), size.n_slots, block_size) for size in sizes.windows
        )
        n_states = sizes.states.running + sizes.states.saved if sizes.states else 0
        self.states = StateArena(layout.states, n_states)
        self.kv_format = _kv_format(layout, block_size)
        self.part_bytes = (
            block_bytes(layout.full_layers, block_size),
            *(block_bytes(layout.layers_of(window), block_size) for window in layout.windows),
            state_bytes(layout.states),
        )

    def has_room_for(self, plan: StepPlan) -> bool:
        """Whether memory has been taken for all blocks that a plan writes."""
        full = self.full
        return full.n_allocated == full.n_blocks or _last_block(plan) < full.n_allocated

    def grow_for(self, plan: StepPlan) -> None:
        """Take memory for them. Nothing may be in flight."""
        self.full.grow(_last_block(plan) + 1)

    def execute(self, ops: Iterable[StorageOp]) -> None:
        """Each group's ops, one after another; groups do not depend on each other.

        Raises ArenaError or IndexError for an unknown block or state, and for bytes of the wrong
        size.
        """
        changes: dict[int | None, list[CopyBlock | FillBlock]] = {}
        for op in ops:
            match op:
                case CopyBlock() | FillBlock():
                    changes.setdefault(op.group, []).append(op)
                case FillState(slot, data):
                    fill_state(self.states, slot, data)
                case ResetState() | CopyState() | RollBackState():
                    self.states.execute(op)
        for group, of_group in changes.items():
            _change(self.full if group is None else self.windows[group], of_group)

    def read(self, reads: Sequence[ReadBlock]) -> PendingReads:
        """Lay out what is to be read, as it is now.

        It refers to the arenas' arrays until it has been computed. Raises ArenaError for an
        unknown block.
        """
        lengths = [read.n_tokens for read in reads]
        blocks = pack_blocks(self.full, [read.block for read in reads], lengths)
        columns = [Column(range(len(reads)), blocks)]
        for group, arena in enumerate(self.windows):
            asked = _asked(read.windows[group] for read in reads)
            slots = [BlockId(slot) for slot in asked.values()]
            packed = pack_blocks(arena, slots, [lengths[index] for index in asked])
            columns.append(Column(list(asked), packed))
        asked = _asked(read.state for read in reads)
        columns.append(Column(list(asked), pack_states(self.states, list(asked.values()))))
        return PendingReads(len(reads), columns)

    def arrays(self) -> list[mx.array]:
        """All that a forward may have written, to be evaluated at once and not kept."""
        windows = [array for arena in self.windows for array in arena.planes()]
        return [*self.full.planes(), *windows, *self.states.unevaluated()]


def _last_block(plan: StepPlan) -> int:
    """The highest of the blocks that a plan puts into tables, fills or copies to; -1: none."""
    listed = (max(patch.ids) for _, patch in plan.patches if patch.group is None and patch.ids)
    ops = [op for _, op in plan.ops if isinstance(op, CopyBlock | FillBlock) and op.group is None]
    changed = (op.target if isinstance(op, CopyBlock) else op.block for op in ops)
    return max([-1, *listed, *changed])


def _change(arena: Arena, ops: Iterable[CopyBlock | FillBlock]) -> None:
    for _, alike in groupby(ops, type):
        copies, contents = list[CopyBlock](), dict[BlockId, bytes | memoryview]()
        for op in alike:
            match op:
                case CopyBlock():
                    copies.append(op)
                case FillBlock(block, data):
                    contents[block] = data
        arena.copy(copies)
        fill_blocks(arena, contents)


def _asked(slots: Iterable[SlotId | None]) -> dict[int, SlotId]:
    """The slots to read, by the index of the read."""
    return {index: slot for index, slot in enumerate(slots) if slot is not None}


def _kv_format(layout: Layout, block_size: int) -> str:
    windows = (
        f"window{window}={describe_layers(layout.layers_of(window))}" for window in layout.windows
    )
    full = f"full={describe_layers(layout.full_layers)}"
    states = f"state={describe_states(layout.states)}"
    return " ".join([FORMAT, f"block={block_size}", full, *windows, states])
