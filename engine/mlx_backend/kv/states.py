"""The states of recurrent layers, as MLX arrays: one row of a batch for each slot.

MLX arrays are values that nobody changes. So a batch that a forward has left is kept as it is: it
is handed back untouched when the next forward has the same rows in the same order. A copy of a
state takes its row out of the batch, all of which would stay for it otherwise; a copy of a row that
is alone is one more slot that refers to it. A row that no slot refers to stays with its batch until
the batches have more rows than the arena has slots; then what is left of such batches is copied out
of them. Once that has been evaluated the slots hold at most `n_slots` states again, and with them
those that the latest step has replaced, which may be one too many.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import mlx.core as mx

from kvstore.ops import CopyState, ResetState, RollBackState
from kvstore.types import SlotId


@dataclass(frozen=True, slots=True)
class StateShape:
    """One array of a state, without its row axis."""

    shape: tuple[int, ...]
    dtype: mx.Dtype

    @property
    def bytes(self) -> int:
        size = self.dtype.size
        for extent in self.shape:
            size *= extent
        return size


def state_bytes(shapes: Iterable[StateShape]) -> int:
    """Bytes of one sequence's state."""
    return sum(shape.bytes for shape in shapes)


@dataclass(eq=False, slots=True)
class _Batch:
    """States side by side, each array `[rows, *shape]`, and the row of each slot that has one."""

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
    """`n_slots` states of equal shape. A slot that was never written holds the initial state."""

    def __init__(self, shapes: Sequence[StateShape], n_slots: int) -> None:
        self.shapes = tuple(shapes)
        self.n_slots = n_slots
        self._batches: dict[SlotId, _Batch] = {}
        self._before: dict[SlotId, tuple[list[mx.array], int]] = {}  # the latest step, and the row
        self._n_rows = 0
        self._unevaluated: list[mx.array] = []

    def execute(self, op: ResetState | CopyState | RollBackState) -> None:
        """Raises IndexError for a slot that is not one of the arena's."""
        match op:
            case ResetState(slot):
                self._check(slot)
                self._unbind(slot)
            case RollBackState(slot):
                self._check(slot)
                self._roll_back(slot)
            case CopyState(source, target):
                self._check(source)
                self._check(target)
                if source != target:
                    self._copy(source, target)

    def read(self, slots: Sequence[SlotId]) -> list[mx.array]:
        """The slots' states side by side: each array with `[rows, *shape]`."""
        runs = [self._rows(batch, list(run)) for batch, run in groupby(slots, self._batches.get)]
        if len(runs) == 1:
            return runs[0]
        return [mx.concatenate(list(arrays)) for arrays in zip(*runs, strict=True)]

    def write(self, slots: Sequence[SlotId], arrays: Sequence[mx.array]) -> None:
        """Let the slots hold what `read` gives for them afterwards."""
        for slot in slots:
            if (batch := self._batches.get(slot)) is not None:
                self._before.setdefault(slot, (batch.arrays, batch.row_of[slot]))
            self._unbind(slot)
        # A slice of what the forward computed would keep all of that in memory.
        self._bind([mx.contiguous(array) for array in arrays], slots)
        if self._n_rows > self.n_slots:
            self._copy_out()

    def begin_step(self) -> None:
        """What is written from now on can be rolled back, and what was before no more."""
        self._before.clear()

    def unevaluated(self) -> list[mx.array]:
        """What has been written since the last call, to be evaluated at once."""
        arrays, self._unevaluated = self._unevaluated, []
        return arrays

    def _rows(self, batch: _Batch | None, slots: Sequence[SlotId]) -> list[mx.array]:
        """States of one batch; of none, the initial ones."""
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
        before = self._before.pop(slot, None)
        if before is None:
            return  # the step failed before it came to this state
        arrays, row = before
        self._unbind(slot)
        self._bind([mx.contiguous(array[row : row + 1]) for array in arrays], [slot])

    def _unbind(self, slot: SlotId) -> None:
        """The slot refers to nothing any more."""
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

    def _copy_out(self) -> None:
        """Let go of the rows that no slot refers to."""
        for batch in tuple(dict.fromkeys(self._batches.values())):
            by_row = {row: slot for slot, row in batch.row_of.items()}
            if len(by_row) < batch.n_rows:
                self._copy_rows_out(batch, list(by_row.values()))

    def _copy_rows_out(self, batch: _Batch, slots: Sequence[SlotId]) -> None:
        """Let a batch of just these rows, of one slot each, take the place of `batch`."""
        rest = _Batch(batch.rows(slots), len(slots))
        new_row = {batch.row_of[slot]: row for row, slot in enumerate(slots)}
        for slot, row in batch.row_of.items():
            rest.row_of[slot] = new_row[row]
            self._batches[slot] = rest
        self._n_rows += rest.n_rows - batch.n_rows
        self._unevaluated += rest.arrays

    def _check(self, slot: SlotId) -> None:
        if not 0 <= slot < self.n_slots:
            raise IndexError(f"state {slot} is not one of the arena's {self.n_slots}")
