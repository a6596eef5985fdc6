"""The states of recurrent layers, as MLX arrays: one row of a batch for each slot.

MLX arrays are values that nobody changes. So a batch that a forward has left is kept as it is, and
handed back untouched when the next forward has the same rows in the same order. A row that leaves
its batch is made an array of its own, and so are those that it leaves behind: a row's view would
keep the whole batch in memory. What the slots hold is thus never more than `n_slots` states.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from kvstore.actions import CopyState, ResetState
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
    """States side by side: `arrays[i][row]` is the `i`-th array of the state of `slots[row]`."""

    slots: list[SlotId]
    arrays: list[mx.array]


class StateArena:
    """`n_slots` states of equal shape. A slot that was never written holds the initial state."""

    def __init__(self, shapes: Sequence[StateShape], n_slots: int) -> None:
        self.shapes = tuple(shapes)
        self.n_slots = n_slots
        self._batches: dict[SlotId, _Batch] = {}
        self._unevaluated: list[mx.array] = []

    def carry_out(self, order: ResetState | CopyState) -> None:
        """Raises IndexError for a slot that is not one of the arena's."""
        match order:
            case ResetState(slot):
                self._check(slot)
                self._leave([slot])
            case CopyState(source, target):
                self._check(source)
                self._check(target)
                if source != target:
                    self._copy(source, target)

    def read(self, slots: Sequence[SlotId]) -> list[mx.array]:
        """The slots' states side by side: each array with `[rows, *shape]`."""
        batch = self._batches.get(slots[0])
        if batch is not None and batch.slots == list(slots):
            return batch.arrays
        rows = [self._row(slot) for slot in slots]
        if len(rows) == 1:
            return rows[0]
        return [mx.concatenate(list(arrays)) for arrays in zip(*rows, strict=True)]

    def write(self, slots: Sequence[SlotId], arrays: Sequence[mx.array]) -> None:
        """Let the slots hold what `read` gives for them afterwards."""
        self._leave(slots)
        # A slice of what the forward computed would keep all of that in memory.
        batch = _Batch(list(slots), [mx.contiguous(array) for array in arrays])
        self._unevaluated += batch.arrays
        self._batches.update(dict.fromkeys(slots, batch))

    def unevaluated(self) -> list[mx.array]:
        """What has been written since the last call, to be evaluated at once."""
        arrays, self._unevaluated = self._unevaluated, []
        return arrays

    def _row(self, slot: SlotId) -> list[mx.array]:
        """One state as arrays of one row."""
        batch = self._batches.get(slot)
        if batch is None:
            return [mx.zeros((1, *shape.shape), shape.dtype) for shape in self.shapes]
        row = batch.slots.index(slot)
        return [array[row : row + 1] for array in batch.arrays]

    def _copy(self, source: SlotId, target: SlotId) -> None:
        is_initial = source not in self._batches
        row = self._row(source)
        self._leave([target])
        if not is_initial:
            self._settle(target, row)

    def _leave(self, slots: Sequence[SlotId]) -> None:
        """Take the slots out of their batches; the rows they leave behind stand alone then."""
        leaving = set(slots)
        for slot in slots:
            batch = self._batches.get(slot)
            if batch is None:
                continue
            for other in batch.slots:
                if other not in leaving and len(batch.slots) > 1:
                    self._settle(other, self._row(other))
            for other in leaving.intersection(batch.slots):
                del self._batches[other]

    def _settle(self, slot: SlotId, row: list[mx.array]) -> None:
        alone = _Batch([slot], [mx.contiguous(array) for array in row])
        self._unevaluated += alone.arrays
        self._batches[slot] = alone

    def _check(self, slot: SlotId) -> None:
        if not 0 <= slot < self.n_slots:
            raise IndexError(f"state {slot} is not one of the arena's {self.n_slots}")
