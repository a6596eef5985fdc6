"""Block ids: the pool with their reference counts, and the block table of a sequence."""

from collections.abc import Callable, Iterable, Iterator, Sequence
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


class BlockPool:
    """Who refers to each of `n_blocks` blocks.

    Each block table that lists a block holds one reference to it; `ref_count` counts these. A block
    is *cached* while the prefix index has it. It is free when it has no reference and is not
    cached, and then stands in the free list exactly once.
    """

    def __init__(self, n_blocks: int) -> None:
        if n_blocks < 1:
            raise ValueError(f"a pool needs at least one block, not {n_blocks}")
        self._ref_counts = [0] * n_blocks
        self._cached = bytearray(n_blocks)
        # A stack with the lowest id on top: fresh sequences get runs of neighbouring blocks.
        self._free = [BlockId(block) for block in reversed(range(n_blocks))]
        self._n_referenced = 0
        self._n_shared = 0
        self._n_references = 0
        self._n_releases = 0
        self._n_changes = 0
        self._freed: list[Callable[[BlockId], None]] = []

    def when_freed(self, tell: Callable[[BlockId], None]) -> None:
        """Call `tell` with each block that becomes free."""
        self._freed.append(tell)

    @property
    def n_blocks(self) -> int:
        return len(self._ref_counts)

    @property
    def n_free(self) -> int:
        return len(self._free)

    @property
    def n_referenced(self) -> int:
        """Blocks in at least one table."""
        return self._n_referenced

    @property
    def n_shared(self) -> int:
        """Blocks in two tables or more."""
        return self._n_shared

    @property
    def n_saved(self) -> int:
        """Blocks saved by sharing: references beyond the first of each block."""
        return self._n_references - self._n_referenced

    @property
    def n_releases(self) -> int:
        """How often blocks were released. While it stays the same, no room has been made."""
        return self._n_releases

    @property
    def n_changes(self) -> int:
        """How often anything was changed."""
        return self._n_changes

    @property
    def n_evictable(self) -> int:
        """Cached blocks in no table: what eviction can free."""
        return self.n_blocks - self.n_free - self._n_referenced

    def ref_count(self, block: BlockId) -> int:
        """Number of tables that list the block."""
        return self._ref_counts[block]

    def is_cached(self, block: BlockId) -> bool:
        return self._cached[block] == 1

    def total_refs(self, block: BlockId) -> int:
        """References of tables, and one more if the block is cached."""
        return self._ref_counts[block] + self._cached[block]

    def free_blocks(self) -> Sequence[BlockId]:
        return tuple(self._free)

    def allocate(self, n_blocks: int) -> list[BlockId]:
        """Take free blocks, each with one reference.

        Raises IndexError when fewer are free: callers check `n_free` first.
        """
        if n_blocks > len(self._free):
            raise IndexError(f"{n_blocks} blocks asked for, {len(self._free)} free")
        self._n_changes += 1
        blocks = [self._free.pop() for _ in range(n_blocks)]
        for block in blocks:
            self._ref_counts[block] = 1
        self._n_referenced += n_blocks
        self._n_references += n_blocks
        return blocks

    def retain(self, blocks: Sequence[BlockId]) -> None:
        """One more table lists these blocks. Raises ValueError for a free one."""
        self._n_changes += 1
        ref_counts = self._ref_counts
        for block in blocks:
            count = ref_counts[block]
            if count == 0:
                if not self._cached[block]:
                    raise ValueError(f"block {block} is free and cannot be retained")
                self._n_referenced += 1
            elif count == 1:
                self._n_shared += 1
            ref_counts[block] = count + 1
        self._n_references += len(blocks)

    def release(self, blocks: Sequence[BlockId]) -> list[BlockId]:
        """One table less lists these blocks. Returns those that are evictable from now on.

        Raises ValueError for a block that is in no table.
        """
        self._n_releases += 1 if blocks else 0
        self._n_changes += 1
        ref_counts, evictable = self._ref_counts, []
        for block in reversed(blocks):  # so that the stack hands the run out in order again
            count = ref_counts[block]
            if count == 0:
                raise ValueError(f"block {block} is in no table")
            ref_counts[block] = count - 1
            if count == 2:
                self._n_shared -= 1
            elif count == 1:
                self._n_referenced -= 1
                if self._cached[block]:
                    evictable.append(block)
                else:
                    self._become_free(block)
        self._n_references -= len(blocks)
        return evictable

    def cache(self, block: BlockId) -> None:
        """The prefix index has the block from now on. Raises ValueError if it is free or cached."""
        if self.total_refs(block) == 0 or self._cached[block]:
            raise ValueError(f"block {block} is free or already cached")
        self._n_changes += 1
        self._cached[block] = 1

    def uncache(self, block: BlockId) -> None:
        """The prefix index has the block no more. Raises ValueError if it is not cached."""
        if not self._cached[block]:
            raise ValueError(f"block {block} is not cached")
        self._n_changes += 1
        self._cached[block] = 0
        if self._ref_counts[block] == 0:
            self._become_free(block)

    def _become_free(self, block: BlockId) -> None:
        self._free.append(block)
        for tell in self._freed:
            tell(block)
