"""Hands out blocks: free ones, and evicted ones when those run out."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.blocks.pool import BlockPool
from kvstore.index.prefix_index import PrefixIndex
from kvstore.lease import Refusal
from kvstore.types import BlockId


@dataclass(slots=True)
class StoreCounters:
    """Counted since start; they only grow."""

    evictions: int = 0
    prefix_copies: int = 0  # of a partly adopted block, before the lease that adopted it wrote
    fork_copies: int = 0  # of the last block of a prompt with several outputs
    tail_hit_tokens: int = 0  # adopted beyond whole blocks


class BlockSupply:
    """Blocks of `pool`, of which `index` evicts those that are in no table."""

    def __init__(self, pool: BlockPool, index: PrefixIndex, counters: StoreCounters) -> None:
        self._pool = pool
        self._index = index
        self._counters = counters

    @property
    def available(self) -> int:
        """Blocks that could be handed out now, if need be by eviction."""
        return self._pool.n_free + self._pool.n_evictable

    def available_beside(self, adopted: Sequence[BlockId]) -> int:
        """The same when these, which are indexed, have been adopted."""
        return self.available - sum(self._pool.ref_count(block) == 0 for block in adopted)

    def take(self, n_blocks: int) -> list[BlockId] | Refusal:
        """Free blocks, evicting as many as it takes."""
        if n_blocks > self.available:
            return Refusal(n_blocks, self.available)
        while self._pool.n_free < n_blocks:
            if self._index.evict() is None:  # below what is evictable a table has a block
                return Refusal(n_blocks, self._pool.n_free)
            self._counters.evictions += 1
        return self._pool.allocate(n_blocks)

    def take_behind(
        self, adopted: Sequence[BlockId], n_blocks: int
    ) -> tuple[BlockId, ...] | Refusal:
        """Retain `adopted` and take more blocks to follow them, or leave everything as it was."""
        self._pool.retain(adopted)  # before anything is evicted, lest it be these
        fresh = self.take(n_blocks)
        if isinstance(fresh, Refusal):
            self.release(adopted)
            return fresh
        return (*adopted, *fresh)

    def release(self, blocks: Sequence[BlockId]) -> None:
        """One table less lists them; what only the index has now can be evicted."""
        self._index.offer(self._pool.release(blocks))
