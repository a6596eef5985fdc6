"""Block ids: the pool with their reference counts, and the block table of a sequence."""

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from kvstore.types import BlockId


def blocks_for(n_tokens: int, block_size: int) -> int:
    """Number of blocks that hold `n_tokens` tokens, the tail included."""
    return -(-n_tokens // block_size)


class DirtyRange:
    """The smallest run of a table's entries that has all entries changed since the last `take`."""

    __slots__ = ("_end", "_first")

    def __init__(self, first: int, end: int) -> None:
        self._first, self._end = first, end

    def add(self, first: int, end: int) -> None:
        """Add the changed entries [first, end), at least one."""
        if self._first == self._end:
            self._first, self._end = first, end
        else:
            self._first, self._end = min(self._first, first), max(self._end, end)

    def take(self) -> tuple[int, int]:
        """The run [first, end), which is empty afterwards."""
        taken = self._first, self._end
        self._first = self._end = 0
        return taken


class BlockTable(list[BlockId]):
    """A sequence's blocks: entry `i` holds positions [i * block_size, (i + 1) * block_size).

    Only `extend` and `repoint` change it, and note what they change.
    """

    __slots__ = ("_dirty", "block_size")

    def __init__(self, block_size: int, blocks: Iterable[BlockId] = ()) -> None:
        super().__init__(blocks)
        self.block_size = block_size
        self._dirty = DirtyRange(0, len(self))

    def extend(self, blocks: Iterable[BlockId]) -> None:
        """Add blocks for more positions at the end."""
        first = len(self)
        super().extend(blocks)
        if first < len(self):
            self._dirty.add(first, len(self))

    def repoint(self, index: int, block: BlockId) -> BlockId:
        """Replace entry `index` by `block`. Returns the block that it listed before."""
        old, self[index] = self[index], block
        self._dirty.add(index, index + 1)
        return old

    def take_changes(self) -> tuple[int, tuple[BlockId, ...]]:
        """A run of entries with all changes since the last call: its first entry, its blocks."""
        first, end = self._dirty.take()
        return first, tuple(self[first:end])


class BlockPool:
    """Reference counts of `n_blocks` blocks.

    Each block table that lists a block holds one reference to it; `ref_count` counts these. A block
    is *cached* while the prefix cache indexes it. A block without references that is not cached is
    free, and is in the free list exactly once. The counters are for reading.
    """

    def __init__(self, n_blocks: int) -> None:
        if n_blocks < 1:
            raise ValueError(f"a pool needs at least one block, not {n_blocks}")
        self.n_blocks: Final = n_blocks
        self.n_referenced = 0  # blocks in at least one table
        self.n_shared = 0  # blocks in two tables or more
        self.n_references = 0  # of all tables to all blocks
        self.n_releases = 0  # calls that released blocks: while it is unchanged, no room was made
        self.n_changes = 0  # calls that changed the pool
        self._ref_counts = [0] * n_blocks
        self._cached = bytearray(n_blocks)
        # A stack with the lowest id on top: fresh sequences get runs of neighbouring blocks.
        self._free = [BlockId(block) for block in reversed(range(n_blocks))]
        self._on_free: list[Callable[[BlockId], None]] = []

    def on_free(self, callback: Callable[[BlockId], None]) -> None:
        """Call `callback` with each block that becomes free."""
        self._on_free.append(callback)

    @property
    def n_free(self) -> int:
        return len(self._free)

    @property
    def n_evictable(self) -> int:
        """Number of cached blocks in no table: what eviction can free."""
        return self.n_blocks - len(self._free) - self.n_referenced

    @property
    def n_saved(self) -> int:
        """Number of blocks saved by sharing: references beyond the first of each block."""
        return self.n_references - self.n_referenced

    def ref_count(self, block: BlockId) -> int:
        """Number of tables that list the block."""
        return self._ref_counts[block]

    def n_unlisted(self, blocks: Sequence[BlockId]) -> int:
        """How many of the blocks are in no table."""
        return list(map(self._ref_counts.__getitem__, blocks)).count(0)

    def is_cached(self, block: BlockId) -> bool:
        return self._cached[block] == 1

    def total_refs(self, block: BlockId) -> int:
        """References of tables, and one more if the block is cached."""
        return self._ref_counts[block] + self._cached[block]

    def free_blocks(self) -> Sequence[BlockId]:
        return tuple(self._free)

    def sort_free(self) -> None:
        """Hand out the free blocks with the lowest ids first, as in a pool that is new."""
        self._free.sort(reverse=True)

    def allocate(self, n_blocks: int) -> list[BlockId]:
        """Take free blocks, each with one reference.

        Raises IndexError when fewer are free: callers check `n_free` first.
        """
        if n_blocks > len(self._free):
            raise IndexError(f"{n_blocks} blocks asked for, {len(self._free)} free")
        self.n_changes += 1
        blocks = [self._free.pop() for _ in range(n_blocks)]
        for block in blocks:
            self._ref_counts[block] = 1
        self.n_referenced += n_blocks
        self.n_references += n_blocks
        return blocks

    def retain(self, blocks: Sequence[BlockId]) -> None:
        """Increment reference counts: one more table lists the blocks.

        Raises ValueError for a free block.
        """
        self.n_changes += 1
        ref_counts = self._ref_counts
        for block in blocks:
            count = ref_counts[block]
            if count == 0:
                if not self._cached[block]:
                    raise ValueError(f"block {block} is free and cannot be retained")
                self.n_referenced += 1
            elif count == 1:
                self.n_shared += 1
            ref_counts[block] = count + 1
        self.n_references += len(blocks)

    def release(self, blocks: Sequence[BlockId]) -> list[BlockId]:
        """Decrement reference counts: one table less lists the blocks.

        Returns the blocks that became evictable. Raises ValueError for a block that is in no table.
        """
        self.n_releases += 1 if blocks else 0
        self.n_changes += 1
        ref_counts, evictable = self._ref_counts, []
        for block in reversed(blocks):  # so that the stack hands the run out in order again
            count = ref_counts[block]
            if count == 0:
                raise ValueError(f"block {block} is in no table")
            ref_counts[block] = count - 1
            if count == 2:
                self.n_shared -= 1
            elif count == 1:
                self.n_referenced -= 1
                if self._cached[block]:
                    evictable.append(block)
                else:
                    self._free_block(block)
        self.n_references -= len(blocks)
        return evictable

    def cache(self, block: BlockId) -> None:
        """Mark a block as indexed by the prefix cache.

        Raises ValueError if the block is free or already cached.
        """
        if self.total_refs(block) == 0 or self._cached[block]:
            raise ValueError(f"block {block} is free or already cached")
        self.n_changes += 1
        self._cached[block] = 1

    def uncache(self, block: BlockId) -> None:
        """Mark a block as no longer indexed. Raises ValueError if it is not cached."""
        if not self._cached[block]:
            raise ValueError(f"block {block} is not cached")
        self.n_changes += 1
        self._cached[block] = 0
        if self._ref_counts[block] == 0:
            self._free_block(block)

    def _free_block(self, block: BlockId) -> None:
        self._free.append(block)
        for callback in self._on_free:
            callback(block)
