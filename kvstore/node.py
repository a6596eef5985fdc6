"""A node of the radix tree, and the values that the tree and its users exchange about nodes."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple, TypeAlias

from kvstore.pool import blocks_for
from kvstore.tokens import TOKEN_BYTES, Digest, unpacked
from kvstore.types import BlockId, Namespace


@dataclass(eq=False, repr=False, slots=True)
class Node:
    """A run of blocks that follows the blocks of `parent`. `packed` holds their tokens.

    `hashes` has the hash of each block, tails included, if the tree computes hashes. A node whose
    blocks have been taken from the index has none. The root of a namespace has no parent and no
    blocks; its one hash is that of the namespace. With a cleared `root`, a node is not indexed any
    more, though it may keep its blocks for a while.

    The `subtree_` sums are over the node and its descendants, as of the last `RadixTree.add_up`;
    `is_outdated`: they have changed since, and so have those of its ancestors.

    Two fields are the disk cache's. `n_saved`: its first blocks that were on disk, or on their way,
    when they were last looked at. `save_at`: when the rest is to be written, in seconds of the disk
    cache's clock; None: nothing is new.
    """

    serial: int
    namespace: Namespace
    parent: "Node | None"
    packed: bytearray = field(default_factory=bytearray)
    last_used: float = 0.0
    blocks: list[BlockId] = field(default_factory=list)
    hashes: list[Digest] = field(default_factory=list)
    children: list["Node"] = field(default_factory=list)
    root: "Node" = field(init=False)
    is_cleared: bool = False  # of a root
    is_queued: bool = False  # has its one entry in the eviction queue
    subtree_nodes: int = 0
    subtree_tokens: int = 0
    subtree_blocks: int = 0
    is_outdated: bool = False
    n_saved: int = 0
    save_at: float | None = None

    def __post_init__(self) -> None:
        self.root = self if self.parent is None else self.parent.root

    @property
    def is_indexed(self) -> bool:
        """Whether the node is in the tree and has blocks."""
        return bool(self.blocks) and not self.root.is_cleared

    @property
    def n_tokens(self) -> int:
        return len(self.packed) // TOKEN_BYTES

    def add_up(self) -> None:
        """Bring the sums up to date with those of the children, and the age."""
        n_nodes, n_tokens = int(self.parent is not None), self.n_tokens
        n_blocks = len(self.blocks)
        for child in self.children:
            n_nodes += child.subtree_nodes
            n_tokens += child.subtree_tokens
            n_blocks += child.subtree_blocks
            self.last_used = max(self.last_used, child.last_used)
        self.subtree_nodes, self.subtree_tokens, self.subtree_blocks = n_nodes, n_tokens, n_blocks
        self.is_outdated = False

    def whole_blocks(self, block_size: int) -> int:
        """The number of blocks that are filled: all, or all but a tail."""
        return self.n_tokens // block_size

    def stored(self, block_size: int, first: int = 0) -> "tuple[BlocksStored, ...]":
        """The fact that the whole blocks from the one at `first` on are indexed, if there are any.
        The tree must compute hashes.
        """
        stop, n_bytes = self.whole_blocks(block_size), block_size * TOKEN_BYTES
        if stop <= first:
            return ()
        assert self.parent is not None, "a root has no blocks"
        is_first = first == 0 and self.parent.parent is None
        parent = None if is_first else self.parent_hash(first)
        packed = bytes(self.packed[first * n_bytes : stop * n_bytes])
        hashes = tuple(self.hashes[first:stop])
        return (BlocksStored(self.namespace, parent, hashes, packed),)

    def removed(self, block_size: int, first: int = 0) -> "tuple[BlocksRemoved, ...]":
        """The fact that the whole blocks from the one at `first` on leave the index, if any."""
        hashes = tuple(self.hashes[first : self.whole_blocks(block_size)])
        return (BlocksRemoved(self.namespace, hashes),) if hashes else ()

    def token_ids(self, most: int) -> tuple[int, ...]:
        """The first tokens of the node, at most `most`."""
        return tuple(unpacked(bytes(self.packed[: most * TOKEN_BYTES])))

    def parent_hash(self, index: int) -> Digest:
        """The hash of the block before the node's block at `index`, or that of the namespace."""
        if index:
            return self.hashes[index - 1]
        assert self.parent is not None, "a root has no blocks"
        return self.parent.hashes[-1]

    def path(self) -> "Iterator[Node]":
        """The node and its ancestors, without the root."""
        node: Node | None = self
        while node is not None and node.blocks:
            yield node
            node = node.parent


def with_descendants(nodes: Sequence[Node]) -> Iterator[Node]:
    """Each of these nodes and of their descendants, parents first."""
    pending = list(nodes)
    while pending:
        node = pending.pop()
        yield node
        pending += node.children


def add_up(roots: Iterable[Node], most: float) -> bool:
    """Bring the sums of at most `most` nodes below these up to date, leaves first. Returns whether
    all are up to date.
    """
    for root in roots:
        path = [(root, iter(root.children))] if root.is_outdated else []
        while path:
            node, children = path[-1]
            child = next((child for child in children if child.is_outdated), None)
            if child is not None:
                path.append((child, iter(child.children)))
                continue
            if not most:
                return False
            node.add_up()
            path.pop()
            most -= 1
    return True


class Match(NamedTuple):
    """The longest indexed prefix of a run of tokens.

    `blocks` hold its `n_tokens` tokens. The last block may hold more tokens, or diverge.
    """

    n_tokens: int
    blocks: tuple[BlockId, ...]

    def until(self, n_tokens: int, block_size: int) -> "Match":
        """The part of the match that covers the first `n_tokens` tokens."""
        return Match(n_tokens, self.blocks[: blocks_for(n_tokens, block_size)])


NO_MATCH = Match(0, ())


class Change(Enum):
    """A change of a node that matters to the disk cache."""

    GROWN = auto()  # it has more blocks, or a group has attached a slot to one of them
    SPLIT = auto()  # its end, with all that was below, is now another node
    ADOPTED = auto()  # a lease has adopted the path that ends with it


class TreeChange(NamedTuple):
    """Something has happened to `node`. `lower`: its former end, where it has been split."""

    change: Change
    node: Node
    lower: Node | None = None


class BlocksStored(NamedTuple):
    """Whole blocks have been indexed after the one with the hash `parent`, which is None before the
    first of a namespace. `packed` holds their tokens.
    """

    namespace: Namespace
    parent: Digest | None
    hashes: tuple[Digest, ...]
    packed: bytes


class BlocksRemoved(NamedTuple):
    """Whole blocks, the ends of chains, are no longer indexed."""

    namespace: Namespace
    hashes: tuple[Digest, ...]


class NamespaceCleared(NamedTuple):
    """Nothing of the namespace is indexed any more."""

    namespace: Namespace


BlockEvent: TypeAlias = BlocksStored | BlocksRemoved | NamespaceCleared
"""A fact about which whole blocks are indexed. It refers to nothing that changes."""


class Adoption(NamedTuple):
    """A lease adopted `n_tokens` tokens of cached prefix; `block` holds the last one."""

    block: BlockId
    n_tokens: int
    seconds: float  # of the tree's clock
