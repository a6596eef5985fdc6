"""What the blocks in the tree are called on disk."""

from collections.abc import Iterator

from kvstore.digest import Digest, digest_behind, root_digest
from kvstore.index.radix_node import Node
from kvstore.tokens import TOKEN_BYTES
from kvstore.types import BlockId, Namespace


class BlockNames:
    """An observer of the tree. Its blocks, tails too, have names until they are free."""

    def __init__(self, block_size: int) -> None:
        self._block_bytes = block_size * TOKEN_BYTES
        self._names: dict[BlockId, Digest] = {}

    def root(self, namespace: Namespace) -> Digest:
        """Not remembered: salts come and go."""
        return root_digest(namespace)

    def of(self, block: BlockId) -> Digest:
        """Raises KeyError for a block that is not in the tree and never was."""
        return self._names[block]

    def get(self, block: BlockId) -> Digest | None:
        """On any thread, where a block may have been handed on since."""
        return self._names.get(block)

    def above(self, node: Node, index: int) -> Digest:
        """The name behind which the node's block at `index` stands."""
        if index:
            return self._names[node.blocks[index - 1]]
        parent = node.parent
        if parent is None or not parent.blocks:
            return self.root(node.namespace)
        return self._names[parent.blocks[-1]]

    def whole_blocks(self, node: Node) -> int:
        return len(node.packed) // self._block_bytes

    def ends(self, node: Node) -> Iterator[Digest]:
        """Of all from the root to its lower end: the last whole block's, and the tail's."""
        whole = self.whole_blocks(node)
        if whole or (node.parent is not None and node.parent.blocks):
            yield self.above(node, whole)
        yield from map(self.of, node.blocks[whole:])

    def tail(self, node: Node, index: int, n_tokens: int) -> Digest:
        """The name of the first tokens of the node's block at `index`."""
        start = index * self._block_bytes
        packed = bytes(node.packed[start : start + n_tokens * TOKEN_BYTES])
        return digest_behind(self.above(node, index), packed)

    def forget(self, block: BlockId) -> None:
        self._names.pop(block, None)

    def stored(self, node: Node, first: int) -> None:
        name = self.above(node, first)
        for index in range(first, len(node.blocks)):
            start = index * self._block_bytes
            name = digest_behind(name, bytes(node.packed[start : start + self._block_bytes]))
            self._names[node.blocks[index]] = name

    def split(self, node: Node, lower: Node) -> None:
        """Blocks keep their names."""

    def used(self, node: Node) -> None:
        """Blocks keep their names."""

    def removed(self, node: Node, n_blocks: int) -> None:
        """They go when they are free."""

    def cleared(self, namespace: Namespace) -> None:
        """They go when they are free."""
