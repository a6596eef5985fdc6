"""What a step reads of the storage: laid out by the step, turned into bytes after it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx

from engine.mlx_backend.storage.packing import Packed
from kvstore.actions import Parts


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
