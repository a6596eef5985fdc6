"""The hashes by which the disk knows the blocks in the tree. Each covers all tokens before it."""

from collections.abc import Iterator

from kvstore.tokens import TOKEN_BYTES, Digest, digest_behind, root_digest
from kvstore.tree import Node
from kvstore.types import BlockId, Namespace


class BlockHashes:
    """An observer of the tree. Keeps the hashes of its blocks, tails too, until they are free."""

    def __init__(self, block_size: int) -> None:
        self._block_bytes = block_size * TOKEN_BYTES
        self._hashes: dict[BlockId, Digest] = {}

    def root(self, namespace: Namespace) -> Digest:
        """The parent of a namespace's first blocks. Not kept: salts come and go."""
        return root_digest(namespace)

    def of(self, block: BlockId) -> Digest:
        """The block's hash. Raises KeyError for a block that never was in the tree."""
        return self._hashes[block]

    def get(self, block: BlockId) -> Digest | None:
        """The block's hash, or None. On any thread; the block may have been reused meanwhile."""
        return self._hashes.get(block)

    def parent(self, node: Node, index: int) -> Digest:
        """The hash of what comes before the node's block at `index`: its parent on disk."""
        if index:
            return self._hashes[node.blocks[index - 1]]
        above = node.parent
        if above is None or not above.blocks:
            return self.root(node.namespace)
        return self._hashes[above.blocks[-1]]

    def whole_blocks(self, node: Node) -> int:
        return len(node.packed) // self._block_bytes

    def ends(self, node: Node) -> Iterator[Digest]:
        """The hashes of the last whole block on the path to the node's end, and of the tail."""
        whole = self.whole_blocks(node)
        if whole or (node.parent is not None and node.parent.blocks):
            yield self.parent(node, whole)
        yield from map(self.of, node.blocks[whole:])

    def tail(self, node: Node, index: int, n_tokens: int) -> Digest:
        """The hash of the first `n_tokens` tokens of the node's block at `index`."""
        start = index * self._block_bytes
        packed = bytes(node.packed[start : start + n_tokens * TOKEN_BYTES])
        return digest_behind(self.parent(node, index), packed)

    def forget(self, block: BlockId) -> None:
        self._hashes.pop(block, None)

    def stored(self, node: Node, first: int) -> None:
        block_hash = self.parent(node, first)
        for index in range(first, len(node.blocks)):
            start = index * self._block_bytes
            packed = bytes(node.packed[start : start + self._block_bytes])
            block_hash = digest_behind(block_hash, packed)
            self._hashes[node.blocks[index]] = block_hash

    def split(self, node: Node, lower: Node) -> None:
        """Blocks keep their hashes."""

    def used(self, node: Node, n_tokens: int) -> None:
        """Blocks keep their hashes."""

    def removed(self, node: Node, n_blocks: int) -> None:
        """Hashes are forgotten when their blocks are free."""

    def cleared(self, namespace: Namespace) -> None:
        """Hashes are forgotten when their blocks are free."""
