"""The states of recurrent layers as MLX arrays: each slot refers to one row of a batch.

MLX arrays do not change. So the batch of states that a forward returns is kept as it is, and the
next forward of the same rows in the same order gets the same arrays.

A copy of a state is a new batch of one row, since a second reference would keep the whole batch in
memory. Only the one row of a batch is shared. Rows to which no slot refers stay in memory until all
batches together take more than the arena may. Then the rows in use are copied to smaller batches.
For a rollback, the states that the latest step has replaced are kept as well, beyond that limit.

Where states are saved in less precision than the model computes them in, a state that has just been
rounded is stored in the types of saved states, so a saved copy can share its memory. The next
forward gets it in the model's own types.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import prod

import mlx.core as mx

from kvstore.ops import CopyState, ResetState, RollBackState, RoundState
from kvstore.sizes import StateCounts
from kvstore.types import SlotId

FLOAT16_MAX = 65504.0

LAYER_COPIES = 4
"""Arrays of the size of a layer's states that a decode step holds at once while it computes them.
At most 3.2 were measured on a CPU, in qwen3_next, of all architectures of mlx-lm with states.
"""


@dataclass(frozen=True, slots=True)
class ArrayShape:
    """Shape and dtype of one array of a state or of a block, without the leading axis."""

    shape: tuple[int, ...]
    dtype: mx.Dtype

    @property
    def bytes(self) -> int:
        """Bytes of one row."""
        return prod(self.shape) * self.dtype.size


def state_bytes(shapes: Iterable[ArrayShape]) -> int:
    """Bytes of one sequence's state."""
    return sum(shape.bytes for shape in shapes)


@dataclass(frozen=True, slots=True)
class StateBytes:
    """The size of one sequence's state as the model computes it, and as it is saved. `layer`: of
    its share in the layer that has most, as computed.
    """

    computed: int
    saved: int
    layer: int = 0

    @property
    def running(self) -> int:
        """What to reserve for a running sequence: its state, and by how much the snapshot for a
        draft is larger than the saved state whose slot it takes.
        """
        return 2 * self.computed - self.saved

    @property
    def replaced(self) -> int:
        """What a step takes for a sequence: the state that it makes, since the one before is kept,
        and what one layer makes it of.
        """
        return self.computed + LAYER_COPIES * self.layer

    @property
    def are_rounded(self) -> bool:
        """Whether states are saved in less precision than the model computes them in."""
        return self.saved < self.computed

    def total(self, counts: StateCounts) -> int:
        """What to reserve for all running and saved states."""
        return counts.running * self.running + counts.saved * self.saved


@dataclass(eq=False, slots=True)
class _Batch:
    """States of several slots: arrays `[rows, *shape]`, and by slot the index of its row."""

    arrays: list[mx.array]
    n_rows: int
    row_of: dict[SlotId, int] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def rows(self, slots: Sequence[SlotId]) -> list[mx.array]:
        """The states of these slots, in this order: arrays `[slots, *shape]`."""
        rows = [self.row_of[slot] for slot in slots]
        if rows == list(range(self.n_rows)):
            return self.arrays
        index = mx.array(rows)
        return [array[index] for array in self.arrays]


class StateArena:
    """States in numbered slots. A slot that was never written has the initial state, all zeros."""

    def __init__(
        self, shapes: Sequence[ArrayShape], saved_shapes: Sequence[ArrayShape], counts: StateCounts
    ) -> None:
        """`shapes` are those of a state's arrays as the model computes them, `saved_shapes` those
        of the same arrays as they are saved.
        """
        self.shapes = tuple(shapes)
        self.saved_shapes = tuple(saved_shapes)
        self.n_slots = counts.total
        self._most_bytes = StateBytes(state_bytes(shapes), state_bytes(saved_shapes)).total(counts)
        self.reset()

    def reset(self) -> None:
        """Give all slots the initial state."""
        self._batches: dict[SlotId, _Batch] = {}
        self._before_step: dict[SlotId, tuple[list[mx.array], int]] = {}  # arrays and row
        self.bytes = 0  # of all batches
        self.n_arrays = 0  # of all batches
        self._unevaluated: list[mx.array] = []

    def execute(self, op: ResetState | CopyState | RoundState | RollBackState) -> None:
        """Carry out an op. Raises IndexError for a slot that the arena does not have."""
        for slot in (op.source, op.target) if isinstance(op, CopyState) else (op.slot,):
            if not 0 <= slot < self.n_slots:
                raise IndexError(f"state {slot} is not one of the arena's {self.n_slots}")
        match op:
            case ResetState(slot):
                self._unbind(slot)
            case RoundState(slot) if slot in self._batches:
                rounded = self.read_saved([slot])
                self._unbind(slot)
                self._bind(rounded, [slot])
            case RollBackState(slot):
                self._roll_back(slot)
            case CopyState(source, target) if source != target:
                self._copy(source, target)

    def read(self, slots: Sequence[SlotId]) -> list[mx.array]:
        """The states of these slots in the model's types: arrays `[slots, *shape]`."""
        return self._read(slots, self.shapes)

    def read_saved(self, slots: Sequence[SlotId]) -> list[mx.array]:
        """The states of these slots in the types of saved states: arrays `[slots, *shape]`."""
        return self._read(slots, self.saved_shapes)

    def write(self, slots: Sequence[SlotId], arrays: Sequence[mx.array]) -> None:
        """Write the rows of `arrays` to these slots. The arrays have the shapes and types that
        `read` or `read_saved` returns.
        """
        for slot in slots:
            if (batch := self._batches.get(slot)) is not None:
                self._before_step.setdefault(slot, (batch.arrays, batch.row_of[slot]))
            self._unbind(slot)
        # A slice of what the forward computed would keep all of that in memory.
        self._bind([mx.contiguous(array) for array in arrays], slots)
        if self.bytes > self._most_bytes:
            self._compact()

    def begin_step(self) -> None:
        """Begin a step: from now on a `RollBackState` undoes the writes after this call."""
        self._before_step.clear()

    def unevaluated(self) -> list[mx.array]:
        """The arrays of states that are new since the last call, for the caller to evaluate."""
        arrays, self._unevaluated = self._unevaluated, []
        return arrays

    def drop_failed(self) -> None:
        """Compute all states. Slots of a state that cannot be computed, because its step has
        failed, have the initial one.
        """
        self._unevaluated = []
        for batch in tuple(dict.fromkeys(self._batches.values())):
            if not are_computable(batch.arrays):
                for slot in tuple(batch.row_of):
                    self._unbind(slot)

    def forget(self, slots: Iterable[SlotId]) -> None:
        """Give slots that nobody uses the initial state, and keep no memory for them."""
        for slot in slots:
            self._unbind(slot)
        self._compact()

    def _read(self, slots: Sequence[SlotId], shapes: Sequence[ArrayShape]) -> list[mx.array]:
        runs = [
            self._rows(batch, list(run), shapes) for batch, run in groupby(slots, self._batches.get)
        ]
        if len(runs) == 1:
            return runs[0]
        return [mx.concatenate(list(arrays)) for arrays in zip(*runs, strict=True)]

    def _rows(
        self, batch: _Batch | None, slots: Sequence[SlotId], shapes: Sequence[ArrayShape]
    ) -> list[mx.array]:
        """States of one batch, or initial states where there is no batch."""
        if batch is None:
            return [mx.zeros((len(slots), *shape.shape), shape.dtype) for shape in shapes]
        return [
            _as_type(rows, shape.dtype)
            for rows, shape in zip(batch.rows(slots), shapes, strict=True)
        ]

    def _copy(self, source: SlotId, target: SlotId) -> None:
        self._unbind(target)
        batch = self._batches.get(source)
        if batch is not None and batch.n_rows == 1:
            batch.row_of[target] = batch.row_of[source]
            self._batches[target] = batch
        elif batch is not None:
            self._bind(batch.rows([source]), [target])

    def _roll_back(self, slot: SlotId) -> None:
        before = self._before_step.pop(slot, None)
        if before is None:
            return  # the latest step has not written this state, perhaps because it failed
        arrays, row = before
        self._unbind(slot)
        self._bind([mx.contiguous(array[row : row + 1]) for array in arrays], [slot])

    def _unbind(self, slot: SlotId) -> None:
        """Let the slot refer to no batch: it has the initial state."""
        batch = self._batches.pop(slot, None)
        if batch is not None:
            del batch.row_of[slot]
            if not batch.row_of:
                self.bytes -= batch.bytes
                self.n_arrays -= len(batch.arrays)

    def _bind(self, arrays: list[mx.array], slots: Sequence[SlotId]) -> None:
        """Let slots that refer to no batch refer to the rows of a new one."""
        batch = _Batch(arrays, len(slots), {slot: row for row, slot in enumerate(slots)})
        self.bytes += batch.bytes
        self.n_arrays += len(arrays)
        self._unevaluated += arrays
        self._batches.update(dict.fromkeys(slots, batch))

    def _compact(self) -> None:
        """Replace each batch that has unused rows by a batch of its other rows."""
        for batch in tuple(dict.fromkeys(self._batches.values())):
            slot_of = {row: slot for slot, row in batch.row_of.items()}
            if len(slot_of) == batch.n_rows:
                continue
            kept = _Batch(batch.rows(list(slot_of.values())), len(slot_of))
            new_row = {row: index for index, row in enumerate(slot_of)}
            for slot, row in batch.row_of.items():
                kept.row_of[slot] = new_row[row]
                self._batches[slot] = kept
            self.bytes += kept.bytes - batch.bytes
            self._unevaluated += kept.arrays


def are_computable(arrays: list[mx.array]) -> bool:
    """Compute arrays. Returns whether the device does it."""
    try:
        mx.eval(arrays)
    except Exception:  # MLX may raise anything
        return False
    return True


def _as_type(array: mx.array, dtype: mx.Dtype) -> mx.array:
    """The array in this type. Numbers beyond float16 become its largest, because an infinite one
    would make all later states infinite or NaN.
    """
    if array.dtype == dtype:
        return array
    if dtype == mx.float16:
        array = mx.clip(array, -FLOAT16_MAX, FLOAT16_MAX)
    return array.astype(dtype)
