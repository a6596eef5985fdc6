"""The arrays of all groups of the store: an arena for each kind of block, and the states."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain, groupby, islice
from typing import TypeVar

import mlx.core as mx
import numpy as np
from blake3 import blake3

from engine.core.step import StepPlan
from engine.mlx_backend.host import KeptArrays
from engine.mlx_backend.kv.arena import Arena, ArenaError
from engine.mlx_backend.kv.formats import dtype_name
from engine.mlx_backend.kv.layout import Layout
from engine.mlx_backend.kv.pages import can_release_pages, release_pages
from engine.mlx_backend.kv.shape import LayerShape, block_bytes
from engine.mlx_backend.kv.states import ArrayShape, StateArena, state_bytes
from kvstore.ops import (
    CopyBlock,
    CopyState,
    FillBlock,
    FillState,
    Parts,
    ReadBlock,
    ResetState,
    RollBackState,
    RoundState,
    StorageOp,
)
from kvstore.sizes import StateCounts, StorageSizes, checkpoint_interval
from kvstore.types import BlockId, SlotId

FORMAT = "kv1"

NEARLY_FULL = 3 / 4
"""The used share of its memory from which an arena grows while the engine is idle."""

WORTH_SHRINKING = 8
"""An arena is shrunk where at least one part in this many of its memory is freed by it."""

_WORDS = (mx.uint64, mx.uint32, mx.uint16, mx.uint8)

T = TypeVar("T")


class PendingTransfer:
    """Device arrays being serialized: blocks or states of equal shape, one for each reader.

    Nothing has been computed yet. Until it has been, this refers to the arenas' arrays, and a write
    would copy them.
    """

    def __init__(self, readers: Sequence[int], arrays: Iterable[mx.array]) -> None:
        """`arrays`: each `[readers, ...]`."""
        self._readers, n_rows = readers, len(readers)
        pieces = [mx.contiguous(array.reshape(n_rows, -1)) for array in arrays if array.size]
        # The widest integer that divides all sizes: joining 4 MiB of 8-byte integers takes 0.3 ms,
        # of single bytes 1.2 ms.
        sizes = [piece.nbytes // n_rows for piece in pieces]
        word = next(word for word in _WORDS if not any(size % word.size for size in sizes))
        pieces = [piece.view(word) for piece in pieces]
        self._joined = mx.concatenate(pieces, axis=1) if pieces else mx.zeros((n_rows, 0), word)

    def arrays(self) -> list[mx.array]:
        """The arrays to evaluate before `read`."""
        return [self._joined] if self._joined.size else []

    def read(self) -> dict[int, memoryview]:
        """The bytes for each reader, in MLX's own memory: nothing is copied, and that memory stays
        allocated until every view has been released. MLX reuses it, so its pages are not touched
        for the first time again.
        """
        rows = np.asarray(self._joined).view(np.uint8)
        views = (memoryview(row).toreadonly() for row in rows)
        return dict(zip(self._readers, views, strict=True))


def fill_blocks(arena: Arena, contents: Mapping[BlockId, bytes | memoryview]) -> None:
    """Build writes of whole blocks.

    Raises ArenaError for an unknown block or another size, before anything is written.
    """
    if not contents:
        return
    shapes = [
        ArrayShape((layer.shape.kv_heads, layer.block_size, *part.shape), part.dtype)
        for layer in arena.layers
        for part in layer.shape.parts
    ]
    for block in contents:
        arena.check(block)
    # Consecutive blocks take one operation a layer.
    runs = [
        [block for _, block in run]
        for _, run in groupby(enumerate(sorted(contents)), lambda it: it[1] - it[0])
    ]
    unpacked = [(run[0], _unpack([contents[block] for block in run], shapes)) for run in runs]
    for first, arrays in unpacked:
        remaining = iter(arrays)
        for layer in arena.layers:
            layer.put_blocks(arena.place(first), *islice(remaining, len(layer.shape.parts)))


def _unpack(contents: Sequence[bytes | memoryview], shapes: Sequence[ArrayShape]) -> list[mx.array]:
    """The arrays of several blocks or states, each `[rows, *shape]`. Raises ArenaError for another
    size.
    """
    expected = sum(shape.bytes for shape in shapes)
    for data in contents:
        if len(data) != expected:
            raise ArenaError(f"{len(data)} bytes to fill in where there are {expected}")
    arrays, offset = list[mx.array](), 0
    for one in shapes:
        end = offset + one.bytes
        pieces = b"".join([memoryview(data)[offset:end] for data in contents])
        array = mx.array(np.frombuffer(pieces, np.uint8)) if pieces else mx.zeros(0, mx.uint8)
        arrays.append(array.view(one.dtype).reshape(len(contents), *one.shape))
        offset = end
    return arrays


def _describe(items: Iterable[T], text: Callable[[T], str]) -> str:
    """The texts of items, equal neighbours once: `24*8x128float16+128float16`."""
    return ",".join(f"{len(list(run))}*{one}" for one, run in groupby(map(text, items)))


def _describe_layers(layers: Iterable[LayerShape]) -> str:
    """`24*8x128float16+128float16`: 24 layers of 8 KV heads of K and V."""

    def text(layer: LayerShape) -> str:
        keys, values = layer.codecs
        order = " by channel" if layer.heads.key_channels else ""
        every = f" every {layer.stride}" if layer.stride > 1 else ""
        return f"{layer.kv_heads}x{keys}{order}+{values}{every}"

    return _describe(layers, text)


def _fixed_numbers(*shape: int) -> mx.array:
    """Numbers between -1 and 1 that are the same everywhere, float32."""
    numbers = np.arange(1, 1 + math.prod(shape), dtype=np.uint32) * np.uint32(2_654_435_761)
    return mx.array((numbers >> 8).astype(np.float32) / (1 << 23) - 1).reshape(shape)


def _code_digest(layout: Layout, block_size: int) -> str:
    """16 digits that depend on how this code, on this device, stores fixed vectors and states. What
    other code has rounded or rotated in another way gets another name by it.
    """
    digest, stored = blake3(), list[mx.array]()
    for shape in dict.fromkeys(chain(layout.full_layers, *map(layout.layers_of, layout.windows))):
        arena = Arena([shape], 1, block_size)
        n_slots = shape.block_slots(block_size)
        vectors = (
            _fixed_numbers(1, shape.kv_heads, n_slots, dim).astype(dtype)
            for dim, dtype in shape.vectors
        )
        slots = arena.slot_mapping(mx.zeros(n_slots, mx.int32), mx.arange(n_slots), shape.heads)
        arena.layers[0].write(slots, *vectors)
        stored += arena.contents([BlockId(0)], [block_size])[0]
    states = StateArena(layout.states, layout.saved_states, StateCounts(1, 0))
    states.write(
        [SlotId(0)], [_fixed_numbers(1, *it.shape).astype(it.dtype) for it in states.shapes]
    )
    for array in (*stored, *states.read_saved([SlotId(0)])):
        digest.update(bytes(mx.contiguous(array).reshape(-1).view(mx.uint8)))
    return digest.hexdigest(length=8)


def _kv_format(layout: Layout, block_size: int) -> str:
    """Names the layout of the bytes and the code that makes them; `state=2*16x64float32 every 512`
    is two arrays of a state, rounded after each 512 tokens.
    """
    states = _describe(
        layout.saved_states, lambda one: "x".join(map(str, one.shape)) + dtype_name(one.dtype)
    )
    is_rounded = layout.saved_states != layout.states
    every = f" every {checkpoint_interval(block_size)}" if is_rounded else ""
    return " ".join(
        [
            f"{FORMAT} block={block_size} full={_describe_layers(layout.full_layers)}",
            *(f"window{n}={_describe_layers(layout.layers_of(n))}" for n in layout.windows),
            f"state={states}{every}",
            f"code={_code_digest(layout, block_size)}",
        ]
    )


class PendingReads:
    """Reads of blocks and states as bytes that may not have been computed.

    `parts_of`: the transfers of the blocks, of each window's blocks, and of the states; the readers
    are the indices of the reads that ask for such a part.
    """

    def __init__(self, n_reads: int, parts_of: Sequence[PendingTransfer]) -> None:
        self._n_reads = n_reads
        self._parts_of = parts_of

    def arrays(self) -> list[mx.array]:
        """The arrays to evaluate before `parts`."""
        return [array for transfer in self._parts_of for array in transfer.arrays()]

    def parts(self) -> tuple[Parts, ...]:
        """The parts of each read, in the order of the reads."""
        found = [transfer.read() for transfer in self._parts_of]
        return tuple(tuple(part.get(index) for part in found) for index in range(self._n_reads))


class Storage:
    """`full` holds logical blocks; `windows` and `states` are in the order of the store's groups.

    Layers of a kind that the model does not have take no memory. `kv_format` names the layout of
    the bytes that `read` returns, and what computes them: storages of equal format can fill in each
    other's. `part_bytes`:
    of a block, of each window's block, of a state.
    """

    def __init__(
        self,
        layout: Layout,
        sizes: StorageSizes,
        block_size: int,
        first_blocks: int | None = None,
    ) -> None:
        """`first_blocks`: the number of logical blocks whose memory is taken at once; None: all."""
        self.full = Arena(layout.full_layers, sizes.n_blocks, block_size, first_blocks)
        self.windows = tuple(
            Arena(layout.layers_of(size.window), size.n_slots, block_size) for size in sizes.windows
        )
        self.states = StateArena(
            layout.states, layout.saved_states, sizes.states or StateCounts(0, 0)
        )
        self._layout = layout
        self._last_block = -1  # of those that steps have written to, while the arena grows
        self._is_shrinking = False  # with the next `resize`
        self.part_bytes = (
            block_bytes(layout.full_layers, block_size),
            *(block_bytes(layout.layers_of(window), block_size) for window in layout.windows),
            state_bytes(layout.saved_states),
        )

    @cached_property
    def kv_format(self) -> str:
        return _kv_format(self._layout, self.full.block_size)

    def has_room_for(self, plan: StepPlan) -> bool:
        """Whether memory has been taken for all blocks that a plan writes, and none is to be given
        back. If not, `resize` must follow.
        """
        full = self.full
        if full.n_allocated == full.n_blocks and not self._is_shrinking:
            return True
        self._last_block = max(self._last_block, _last_block(plan))
        return self._last_block < full.n_allocated and not self._is_shrinking

    def should_resize(self) -> bool:
        """Whether a step may soon need memory for more blocks than it has been taken for, or memory
        is to be given back.
        """
        full = self.full
        used = self._last_block + 1
        is_nearly_full = used > NEARLY_FULL * full.n_allocated
        return self._is_shrinking or (full.n_allocated < full.n_blocks and is_nearly_full)

    def shrink(self, free: Collection[BlockId]) -> None:
        """Have the next `resize` give back the memory after the last block that is not `free`, if
        it is worth the copy of all that is before, and of an arena that grows.
        """
        full, unused, kept = self.full, set(free), self.full.n_allocated
        while kept > 1 and kept - 1 in unused:
            kept -= 1
        if full.grows and (full.n_allocated - kept) * WORTH_SHRINKING >= full.n_allocated:
            self._is_shrinking, self._last_block = True, kept - 1

    def resize(self) -> None:
        """Take memory for the blocks that steps have written to, and for some more, or give back
        what `shrink` has found. Nothing may be in flight.
        """
        full, needed = self.full, self._last_block + 1
        if self._is_shrinking and needed < full.n_allocated:
            full.shrink(needed)
        elif not self._is_shrinking or needed > full.n_allocated:
            full.grow(needed)
        self._is_shrinking = False

    def kept(self, n_weights: int) -> KeptArrays:
        """The arrays that stay between steps, `n_weights` of weights among them. On any thread."""
        n_arrays = n_weights + self._layout.n_planes + self.states.n_arrays
        return KeptArrays(n_arrays, self.states.bytes)

    def give_back(self, blocks: Sequence[BlockId], slots: Sequence[Sequence[SlotId]]) -> None:
        """Give back the memory of these blocks, and of slots of each group, that nobody uses, as
        far as it can be had without moving others. Nothing may be in flight, and no op may wait.
        All planes and states must have been computed.
        """
        self.states.forget(chain(*slots[len(self.windows) :]))
        if can_release_pages():
            for arena, unused in zip((self.full, *self.windows), (blocks, *slots), strict=False):
                release_pages(arena, unused)

    def execute(self, ops: Iterable[StorageOp]) -> list[list[mx.array]]:
        """Build each group's ops, one after another; groups do not depend on each other.

        Where blocks are copied or filled, nothing that refers to the arenas may be in flight when
        the arenas are computed, or MLX would copy all of them. Returns what must have been computed
        before, one list after another (`Arena.copy`). Raises ArenaError or IndexError for an
        unknown block or state, and for bytes of the wrong size.
        """
        by_arena: dict[Arena, list[CopyBlock | FillBlock]] = {}
        for op in ops:
            match op:
                case CopyBlock() | FillBlock():
                    arena = self.full if op.group is None else self.windows[op.group]
                    by_arena.setdefault(arena, []).append(op)
                case FillState(slot, data):
                    self.states.write([slot], _unpack([data], self.states.saved_shapes))
                case ResetState() | CopyState() | RoundState() | RollBackState():
                    self.states.execute(op)
        read = list[list[mx.array]]()
        for arena, changes in by_arena.items():
            for _, run in groupby(changes, type):
                alike = list(run)
                read += arena.copy(op for op in alike if isinstance(op, CopyBlock))
                fills = {op.block: op.data for op in alike if isinstance(op, FillBlock)}
                fill_blocks(arena, fills)
        return read

    def read(self, reads: Sequence[ReadBlock]) -> PendingReads:
        """Begin to read blocks, windows and states as they are now.

        The transfers refer to the arenas' arrays until they have been computed. Raises ArenaError
        for an unknown block.
        """
        transfers = list[PendingTransfer]()
        for part, arena in enumerate((self.full, *self.windows)):
            slots = {index: (read.block, *read.windows)[part] for index, read in enumerate(reads)}
            asked = {index: BlockId(slot) for index, slot in slots.items() if slot is not None}
            lengths = [reads[index].n_tokens for index in asked]
            contents = arena.contents(list(asked.values()), lengths) if asked else []
            arrays = (array for of_layer in contents for array in of_layer)
            transfers.append(PendingTransfer(list(asked), arrays))
        states = {i: read.state for i, read in enumerate(reads) if read.state is not None}
        found = self.states.read_saved(list(states.values())) if states else []
        transfers.append(PendingTransfer(list(states), found))
        return PendingReads(len(reads), transfers)

    def fences(self) -> list[mx.array]:
        """Evaluating these completes all writes of blocks made so far (`LayerArena.fences`)."""
        layers = (layer for arena in (self.full, *self.windows) for layer in arena.layers)
        return [fence for layer in layers for fence in layer.fences()]

    def arrays(self) -> list[mx.array]:
        """All that a forward may have written, to be evaluated at once and not kept."""
        return [*self._planes(), *self.states.unevaluated()]

    def _planes(self) -> list[mx.array]:
        return [plane for arena in (self.full, *self.windows) for plane in arena.planes()]

    def settle(self) -> None:
        """After a step has failed: compute what all blocks and states hold. States that cannot be
        computed are those of its rows. Raises what MLX raises where blocks cannot be computed.
        """
        self.states.drop_failed()
        mx.eval(self._planes())

    def renew(self) -> None:
        """Have all blocks hold zeros, and all states be initial ones, in new arrays. The former
        ones are released first, as far as nothing else refers to them.
        """
        arenas = (self.full, *self.windows)
        for arena in arenas:
            arena.release()
        self.states.reset()
        for arena in arenas:
            arena.allocate()


def _last_block(plan: StepPlan) -> int:
    """The highest of the blocks that a plan puts into tables, fills or copies to; -1: none."""
    listed = (max(patch.ids) for _, patch in plan.patches if patch.group is None and patch.ids)
    ops = [op for _, op in plan.ops if isinstance(op, CopyBlock | FillBlock) and op.group is None]
    changed = (op.target if isinstance(op, CopyBlock) else op.block for op in ops)
    return max([-1, *listed, *changed])
