"""Which block holds which positions of one sequence."""

from collections.abc import Iterable, Iterator, Sequence
from typing import overload

from kvstore.types import BlockId


class BlockTable(Sequence[BlockId]):
    """Entry `i` holds positions [i * block_size, (i + 1) * block_size)."""

    __slots__ = ("_blocks", "block_size")

    def __init__(self, block_size: int, blocks: Iterable[BlockId] = ()) -> None:
        self.block_size = block_size
        self._blocks = list(blocks)

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
        """Room for more positions at the end."""
        self._blocks.extend(blocks)

    def repoint(self, index: int, block: BlockId) -> BlockId:
        """Let entry `index` be `block`; returns the block that it was."""
        old, self._blocks[index] = self._blocks[index], block
        return old


def blocks_for(n_tokens: int, block_size: int) -> int:
    """How many blocks hold `n_tokens` tokens, the tail included."""
    return -(-n_tokens // block_size)
