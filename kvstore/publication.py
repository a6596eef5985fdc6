"""The way of a lease's blocks into the index."""

from kvstore.block_table import blocks_for
from kvstore.lease import Lease
from kvstore.prefix_index import PrefixIndex
from kvstore.types import BlockId


class Publication:
    """Goes on behind what is indexed of a lease, so that a block costs the same at any depth."""

    def __init__(self, index: PrefixIndex, block_size: int) -> None:
        self._index = index
        self._block_size = block_size

    def insert(self, lease: Lease, n_tokens: int) -> tuple[int, tuple[BlockId, ...]]:
        """Index the blocks of the lease's first `n_tokens` tokens.

        Returns an entry of its table, and blocks with the same tokens as those from there on.
        """
        first = lease.indexed_blocks
        above = self._indexed(lease, first - 1)
        if above is None:
            first = 0
        packed = lease.tokens.packed(first * self._block_size, n_tokens)
        blocks = lease.table[first : blocks_for(n_tokens, self._block_size)]
        lease.indexed_blocks = n_tokens // self._block_size
        if above is None:
            return first, self._index.insert(lease.namespace, packed, blocks)
        return first, self._index.insert_behind(above, packed, blocks)

    def holder(self, lease: Lease) -> BlockId | None:
        """The indexed block that holds the lease's last written token, and all before it in it."""
        written_tokens = lease.written_tokens
        index = (written_tokens - 1) // self._block_size
        above = self._indexed(lease, index - 1)
        if above is not None:
            packed = lease.tokens.packed(index * self._block_size, written_tokens)
            return self._index.holder_behind(above, packed)
        match = self._index.match(lease.namespace, lease.tokens.packed(0, written_tokens))
        return match.blocks[-1] if match.n_tokens == written_tokens else None

    def _indexed(self, lease: Lease, entry: int) -> BlockId | None:
        """The block of that entry of the table, if there is one and the index has all of it: it may
        have been cleared since, and then have got a part of the block from a fork.
        """
        if entry < 0 or not self._index.has_whole(block := lease.table[entry]):
            return None
        return block
