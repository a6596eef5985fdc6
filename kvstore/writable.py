"""Copy on write: the blocks in which a lease may write its next tokens."""

from collections.abc import Sequence

from kvstore.actions import CopyBlock
from kvstore.blocks.pool import BlockPool
from kvstore.blocks.table import blocks_for
from kvstore.groups.groups import Groups
from kvstore.index.supply import BlockSupply, StoreCounters
from kvstore.lease import Lease, Refusal


class WritableBlocks:
    """Replaces what others refer to by copies, and allocates what is missing."""

    def __init__(
        self,
        pool: BlockPool,
        supply: BlockSupply,
        groups: Groups,
        counters: StoreCounters,
        block_size: int,
    ) -> None:
        self._pool = pool
        self._supply = supply
        self._groups = groups
        self._counters = counters
        self._block_size = block_size

    def extend(self, lease: Lease, end_tokens: int) -> Sequence[CopyBlock] | Refusal:
        """Blocks of the lease's own for what it has not written, up to `end_tokens`."""
        first = lease.planned_tokens // self._block_size
        end = blocks_for(end_tokens, self._block_size)
        reached = range(first, min(end, len(lease.table)))
        shared = [i for i in reached if self._pool.total_refs(lease.table[i]) > 1]
        blocks = self._supply.take(len(shared) + max(end - len(lease.table), 0))
        if isinstance(blocks, Refusal):
            return blocks
        lease.table.append(blocks[len(shared) :])
        lease.ready_tokens = end * self._block_size
        copies = []
        for i, target in zip(shared, blocks, strict=False):
            source = lease.table.repoint(i, target)
            copied_tokens = max(lease.planned_tokens - i * self._block_size, 0)
            copies.append(CopyBlock(source, target, copied_tokens))
            self._groups.copy(source, target, copied_tokens)
        if lease.is_fork or lease.planned_tokens > lease.cached_tokens:  # it has written there
            self._counters.fork_copies += len(copies)
        else:
            self._counters.prefix_copies += len(copies)
        return copies
