"""Block ids, their reference counts and the free list. Knows no keys, no tokens, no recency."""

from collections.abc import Callable, Sequence

from kvstore.types import BlockId


class BlockPool:
    """Who refers to each of `n_blocks` blocks.

    A block is *held* by each table that lists it and *kept* once while the prefix index has it.
    It is free when neither is so, and then stands in the free list exactly once.
    """

    def __init__(self, n_blocks: int) -> None:
        if n_blocks < 1:
            raise ValueError(f"a pool needs at least one block, not {n_blocks}")
        self._holders = [0] * n_blocks
        self._kept = bytearray(n_blocks)
        # A stack with the lowest id on top: fresh sequences get runs of neighbouring blocks.
        self._free = [BlockId(block) for block in reversed(range(n_blocks))]
        self._n_held = 0
        self._n_shared = 0
        self._n_listed = 0
        self._n_drops = 0
        self._freed: list[Callable[[BlockId], None]] = []

    def when_freed(self, tell: Callable[[BlockId], None]) -> None:
        """Call `tell` with each block that becomes free."""
        self._freed.append(tell)

    @property
    def n_blocks(self) -> int:
        return len(self._holders)

    @property
    def n_free(self) -> int:
        return len(self._free)

    @property
    def n_held(self) -> int:
        """Blocks in at least one table."""
        return self._n_held

    @property
    def n_shared(self) -> int:
        """Blocks in two tables or more."""
        return self._n_shared

    @property
    def n_saved(self) -> int:
        """Blocks that there would be besides if no table shared any: a copy for each holder."""
        return self._n_listed - self._n_held

    @property
    def n_drops(self) -> int:
        """How often blocks were dropped. While it stays the same nobody has made room."""
        return self._n_drops

    @property
    def n_cached(self) -> int:
        """Blocks that are kept and in no table: what eviction can free."""
        return self.n_blocks - self.n_free - self._n_held

    def holders(self, block: BlockId) -> int:
        """Number of tables that list the block."""
        return self._holders[block]

    def is_kept(self, block: BlockId) -> bool:
        return self._kept[block] == 1

    def count(self, block: BlockId) -> int:
        """All references: tables that list the block, and one if the index keeps it."""
        return self._holders[block] + self._kept[block]

    def free_blocks(self) -> Sequence[BlockId]:
        return tuple(self._free)

    def allocate(self, n_blocks: int) -> list[BlockId]:
        """Take free blocks, each held once.

        Raises IndexError when fewer are free: callers check `n_free` first.
        """
        if n_blocks > len(self._free):
            raise IndexError(f"{n_blocks} blocks asked for, {len(self._free)} free")
        blocks = [self._free.pop() for _ in range(n_blocks)]
        for block in blocks:
            self._holders[block] = 1
        self._n_held += n_blocks
        self._n_listed += n_blocks
        return blocks

    def hold(self, blocks: Sequence[BlockId]) -> None:
        """One more table lists these blocks. Raises ValueError for a free one."""
        holders = self._holders
        for block in blocks:
            count = holders[block]
            if count == 0:
                if not self._kept[block]:
                    raise ValueError(f"block {block} is free and cannot be held")
                self._n_held += 1
            elif count == 1:
                self._n_shared += 1
            holders[block] = count + 1
        self._n_listed += len(blocks)

    def drop(self, blocks: Sequence[BlockId]) -> list[BlockId]:
        """One table less lists these blocks; returns those that only the index keeps now.

        Raises ValueError for a block that no table holds.
        """
        self._n_drops += 1 if blocks else 0
        holders, cached = self._holders, []
        for block in reversed(blocks):  # so that the stack hands the run out in order again
            count = holders[block]
            if count == 0:
                raise ValueError(f"block {block} is held by no table")
            holders[block] = count - 1
            if count == 2:
                self._n_shared -= 1
            elif count == 1:
                self._n_held -= 1
                if self._kept[block]:
                    cached.append(block)
                else:
                    self._become_free(block)
        self._n_listed -= len(blocks)
        return cached

    def keep(self, block: BlockId) -> None:
        """The index refers to the block from now on. Raises ValueError if it is free or kept."""
        if self.count(block) == 0 or self._kept[block]:
            raise ValueError(f"block {block} is free or already kept")
        self._kept[block] = 1

    def forget(self, block: BlockId) -> None:
        """The index refers to the block no more. Raises ValueError if it did not."""
        if not self._kept[block]:
            raise ValueError(f"block {block} is not kept")
        self._kept[block] = 0
        if self._holders[block] == 0:
            self._become_free(block)

    def _become_free(self, block: BlockId) -> None:
        self._free.append(block)
        for tell in self._freed:
            tell(block)
