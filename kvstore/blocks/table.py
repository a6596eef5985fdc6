"""The block table of one sequence: which block holds which positions."""

from collections.abc import Iterable, Iterator, Sequence
from typing import overload

from kvstore.types import BlockId


class Journal:
    """Which entries of a table have changed since this was last asked, as runs [first, end)."""

    __slots__ = ("_runs",)

    def __init__(self) -> None:
        self._runs: list[tuple[int, int]] = []

    def note(self, first: int, end: int) -> None:
        if self._runs and self._runs[-1][1] == first:
            self._runs[-1] = self._runs[-1][0], end
        elif first < end:
            self._runs.append((first, end))

    def take(self) -> Sequence[tuple[int, int]]:
        if not self._runs:
            return ()
        runs, self._runs = self._runs, []
        return runs


class BlockTable(Sequence[BlockId]):
    """Entry `i` holds positions [i * block_size, (i + 1) * block_size)."""

    __slots__ = ("_blocks", "_journal", "block_size")

    def __init__(self, block_size: int, blocks: Iterable[BlockId] = ()) -> None:
        self.block_size = block_size
        self._blocks = list(blocks)
        self._journal = Journal()
        self._journal.note(0, len(self._blocks))

    @overload
    def __getitem__(self, index: int) -> BlockId: ...
    @overload
    def __getitem__(self, index: slice) -> list[BlockId]: ...
    def __getitem__(self, index: int | slice) -> BlockId | list[BlockId]:
        return self._blocks[index]

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[BlockId]:
        return iter(self._blocks)

    def append(self, blocks: Iterable[BlockId]) -> None:
        """Add blocks for more positions at the end."""
        first = len(self._blocks)
        self._blocks.extend(blocks)
        self._journal.note(first, len(self._blocks))

    def repoint(self, index: int, block: BlockId) -> BlockId:
        """Replace entry `index` by `block`. Returns the block that it was."""
        old, self._blocks[index] = self._blocks[index], block
        self._journal.note(index, index + 1)
        return old

    def take_changes(self) -> Iterator[tuple[int, tuple[BlockId, ...]]]:
        """What has changed since this was last asked: first entries, and the blocks from there."""
        for first, end in self._journal.take():
            yield first, tuple(self._blocks[first:end])


def blocks_for(n_tokens: int, block_size: int) -> int:
    """How many blocks hold `n_tokens` tokens, the tail included."""
    return -(-n_tokens // block_size)
