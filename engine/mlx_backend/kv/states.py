"""The states of recurrent layers, as MLX arrays: each slot refers to one row of a batch.

Nobody changes an MLX array, so a batch of states that a forward returned is kept whole: the next
forward of the same rows in the same order gets it back untouched. Copying a state extracts its row,
because otherwise the copy would keep the whole batch in memory; if the row is alone in its batch,
the copy is one more slot that refers to it. A row that no slot refers to stays with its batch until
the batches have more rows than the arena has slots. Then the rows in use are copied into smaller
batches. Once those have been evaluated, the slots hold at most `n_slots` states. The states that
the latest step replaced come on top, for a rollback, and may be one too many.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import prod

import mlx.core as mx

from kvstore.ops import CopyState, ResetState, RollBackState
from kvstore.types import SlotId


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


@dataclass(eq=False, slots=True)
class _Batch:
    """States of several slots, each array `[rows, *shape]`, and the row of each slot."""

    arrays: list[mx.array]
    n_rows: int
    row_of: dict[SlotId, int] = field(default_factory=dict)

    def rows(self, slots: Sequence[SlotId]) -> list[mx.array]:
        """The slots' states, in their order."""
        rows = [self.row_of[slot] for slot in slots]
        if rows == list(range(self.n_rows)):
            return self.arrays
        index = mx.array(rows)
        return [array[index] for array in self.arrays]


class StateArena:
    """`n_slots` states of equal shapes. A slot that was never written holds the initial state."""

    def __init__(self, shapes: Sequence[ArrayShape], n_slots: int) -> None:
        self.shapes = tuple(shapes)
        self.n_slots = n_slots
        self._batches: dict[SlotId, _Batch] = {}
        self._before_step: dict[SlotId, tuple[list[mx.array], int]] = {}  # arrays and row
        self._n_rows = 0  # of all batches
        self._unevaluated: list[mx.array] = []

    def execute(self, op: ResetState | CopyState | RollBackState) -> None:
        """Raises IndexError for a slot that is not one of the arena's."""
        for slot in (op.source, op.target) if isinstance(op, CopyState) else (op.slot,):
            if not 0 <= slot < self.n_slots:
                raise IndexError(f"state {slot} is not one of the arena's {self.n_slots}")
        match op:
            case ResetState(slot):
                self._unbind(slot)
            case RollBackState(slot):
                self._roll_back(slot)
            case CopyState(source, target) if source != target:
                self._copy(source, target)

    def read(self, slots: Sequence[SlotId]) -> list[mx.array]:
        """The slots' states, one row each: arrays `[rows, *shape]`."""
        runs = [self._rows(batch, list(run)) for batch, run in groupby(slots, self._batches.get)]
        if len(runs) == 1:
            return runs[0]
        return [mx.concatenate(list(arrays)) for arrays in zip(*runs, strict=True)]

    def write(self, slots: Sequence[SlotId], arrays: Sequence[mx.array]) -> None:
        """Let the slots hold the rows of `arrays`, which are shaped as `read` returns them."""
        for slot in slots:
            if (batch := self._batches.get(slot)) is not None:
                self._before_step.setdefault(slot, (batch.arrays, batch.row_of[slot]))
            self._unbind(slot)
        # A slice of what the forward computed would keep all of that in memory.
        self._bind([mx.contiguous(array) for array in arrays], slots)
        if self._n_rows > self.n_slots:
            self._compact()

    def begin_step(self) -> None:
        """Writes from now on can be rolled back; earlier ones no longer can."""
        self._before_step.clear()

    def unevaluated(self) -> list[mx.array]:
        """The arrays written since the last call, to be evaluated at once."""
        arrays, self._unevaluated = self._unevaluated, []
        return arrays

    def _rows(self, batch: _Batch | None, slots: Sequence[SlotId]) -> list[mx.array]:
        """States of one batch, or initial ones where there is none."""
        if batch is None:
            return [mx.zeros((len(slots), *shape.shape), shape.dtype) for shape in self.shapes]
        return batch.rows(slots)

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
            return  # the step failed before it wrote this state
        arrays, row = before
        self._unbind(slot)
        self._bind([mx.contiguous(array[row : row + 1]) for array in arrays], [slot])

    def _unbind(self, slot: SlotId) -> None:
        """The slot holds the initial state from now on."""
        batch = self._batches.pop(slot, None)
        if batch is not None:
            del batch.row_of[slot]
            if not batch.row_of:
                self._n_rows -= batch.n_rows

    def _bind(self, arrays: list[mx.array], slots: Sequence[SlotId]) -> None:
        """Let these slots refer to the rows of a new batch."""
        batch = _Batch(arrays, len(slots), {slot: row for row, slot in enumerate(slots)})
        self._n_rows += batch.n_rows
        self._unevaluated += arrays
        self._batches.update(dict.fromkeys(slots, batch))

    def _compact(self) -> None:
        """Replace each batch with unused rows by one of the rows in use."""
        for batch in tuple(dict.fromkeys(self._batches.values())):
            slot_of = {row: slot for slot, row in batch.row_of.items()}
            if len(slot_of) == batch.n_rows:
                continue
            kept = _Batch(batch.rows(list(slot_of.values())), len(slot_of))
            new_row = {row: index for index, row in enumerate(slot_of)}
            for slot, row in batch.row_of.items():
                kept.row_of[slot] = new_row[row]
                self._batches[slot] = kept
            self._n_rows += kept.n_rows - batch.n_rows
            self._unevaluated += kept.arrays
