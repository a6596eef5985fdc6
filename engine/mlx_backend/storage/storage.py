"""The arrays of all groups of the store: an arena for each kind of block, and the states."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import mlx.core as mx

from engine.mlx_backend.model.layout import Layout
from engine.mlx_backend.storage.arena import Arena, block_bytes
from engine.mlx_backend.storage.packing import (
    FORMAT,
    Packed,
    describe_layers,
    describe_states,
    fill_blocks,
    fill_state,
    pack_blocks,
    pack_states,
)
from engine.mlx_backend.storage.state_arena import StateArena, state_bytes
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

    def __init__(self, layout: Layout, sizes: StorageSizes, block_size: int) -> None:
        self.full = Arena(layout.full_layers, sizes.n_blocks, block_size)
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
        windows = [array for arena in self.windows for array in arena.arrays()]
        return [*self.full.arrays(), *windows, *self.states.unevaluated()]


def _change(arena: Arena, ops: Iterable[CopyBlock | FillBlock]) -> None:
    for _, alike in groupby(ops, type):
        copies, contents = list[CopyBlock](), dict[BlockId, bytes]()
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
