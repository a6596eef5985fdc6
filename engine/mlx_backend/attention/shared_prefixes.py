"""Which rows begin with the same blocks, found from the block tables alone."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.types import BlockId


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Rows [first_row, last_row) have their first `n_blocks` blocks in common."""

    first_row: int
    last_row: int
    n_blocks: int

    @property
    def saved_blocks(self) -> int:
        """Block reads that attending once for all rows saves."""
        return (self.last_row - self.first_row - 1) * self.n_blocks


def shared_prefixes(
    tables: Sequence[Sequence[BlockId]], min_saved_blocks: int
) -> list[SharedPrefix]:
    """Disjoint groups of neighbouring rows, chosen to save the most block reads.

    `tables` are sorted and hold only blocks that each row sees whole. A group is worth its own
    computation when it saves `min_saved_blocks`. A group is either kept with the prefix common to
    all its rows, or split where that prefix ends, whichever saves more.
    """
    return _best(tables, 0, len(tables), 0, min_saved_blocks)


def _best(
    tables: Sequence[Sequence[BlockId]], first: int, last: int, depth: int, min_saved: int
) -> list[SharedPrefix]:
    """The best groups among rows [first, last), which share their first `depth` blocks."""
    split = [
        group
        for start, stop in _runs(tables, first, last, depth)
        if stop - start > 1
        for group in _best(tables, start, stop, _common(tables, start, stop), min_saved)
    ]
    whole = SharedPrefix(first, last, depth)
    if whole.saved_blocks >= max(min_saved, sum(group.saved_blocks for group in split)):
        return [whole]
    return split


def _runs(
    tables: Sequence[Sequence[BlockId]], first: int, last: int, depth: int
) -> list[tuple[int, int]]:
    """Runs of rows whose block at `depth` is the same; rows that end before it are left out."""
    runs: list[tuple[int, int]] = []
    start = first
    for row in range(first + 1, last + 1):
        if row < last and tables[row][depth : depth + 1] == tables[start][depth : depth + 1]:
            continue
        if len(tables[start]) > depth:
            runs.append((start, row))
        start = row
    return runs


def _common(tables: Sequence[Sequence[BlockId]], first: int, last: int) -> int:
    """Blocks that rows [first, last) share. In sorted order the two ends differ the earliest."""
    low, high = tables[first], tables[last - 1]
    for depth, (left, right) in enumerate(zip(low, high, strict=False)):
        if left != right:
            return depth
    return min(len(low), len(high))
