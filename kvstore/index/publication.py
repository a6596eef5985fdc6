"""Publishes a lease's blocks: puts them into the index."""

from kvstore.blocks.pool import BlockPool
from kvstore.blocks.table import blocks_for
from kvstore.groups.groups import Groups
from kvstore.index.prefix_index import PrefixIndex
from kvstore.index.supply import BlockSupply
from kvstore.lease import Lease
from kvstore.types import BlockId


class Publication:
    """Inserts behind what is already indexed of a lease: a block costs the same at any depth."""

    def __init__(
        self, pool: BlockPool, index: PrefixIndex, supply: BlockSupply, groups: Groups
    ) -> None:
        self._pool = pool
        self._index = index
        self._supply = supply
        self._groups = groups

    def insert(self, lease: Lease, n_tokens: int) -> None:
        """Index the blocks of the lease's first `n_tokens` tokens. Where blocks with the same
        tokens are indexed already the table lists these from now on.
        """
        block_size, first = lease.table.block_size, lease.indexed_blocks
        above = self._indexed(lease, first - 1)
        if above is None:
            first = 0
        packed = lease.tokens.packed(first * block_size, n_tokens)
        blocks = lease.table[first : blocks_for(n_tokens, block_size)]
        lease.indexed_blocks = n_tokens // block_size
        if above is None:
            equal = self._index.insert(lease.namespace, packed, blocks)
        else:
            equal = self._index.insert_behind(above, packed, blocks)
        for entry, block in enumerate(equal, first):
            if lease.table[entry] != block:
                self._repoint(lease, entry, block)

    def attach_at_end(self, lease: Lease) -> BlockId | None:
        """Attach what is attached to the lease's own last block to the indexed block that begins
        with the same tokens, as far as they are written. Returns that block, or None.

        It may be another lease's block, with other tokens behind these.
        """
        index, before = divmod(lease.written_tokens - 1, lease.table.block_size)
        indexed, own = self._find_end(lease, index), lease.table[index]
        if indexed is not None and own != indexed:
            self._groups.copy(own, indexed, before + 1)
        return indexed

    def _find_end(self, lease: Lease, index: int) -> BlockId | None:
        written_tokens = lease.written_tokens
        above = self._indexed(lease, index - 1)
        if above is not None:
            packed = lease.tokens.packed(index * lease.table.block_size, written_tokens)
            return self._index.find_behind(above, packed)
        match = self._index.match(lease.namespace, lease.tokens.packed(0, written_tokens))
        return match.blocks[-1] if match.n_tokens == written_tokens else None

    def _indexed(self, lease: Lease, entry: int) -> BlockId | None:
        """The block of that entry of the table, if there is one and the index has all of it: it may
        have been cleared since, and then have got a part of the block from a fork of the lease.
        """
        if entry < 0 or not self._index.has_whole(block := lease.table[entry]):
            return None
        return block

    def _repoint(self, lease: Lease, entry: int, block: BlockId) -> None:
        self._groups.repoint(lease.table[entry], block)
        self._pool.retain((block,))
        self._supply.release((lease.table.repoint(entry, block),))
        lease.is_patched = True
