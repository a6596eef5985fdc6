"""The prefix index: a path-compressed radix tree from token prefixes to blocks.

An edge is a run of blocks and their tokens; it belongs to the node at its lower end. Nodes split at
block boundaries alone. A leaf's edge may end in a tail, a block that is only partly filled.

    root ── [sys sys sys] ─┬─ [user A | answer | ta]      a leaf with a tail
                           └─ [user B]

Siblings may begin with the same tokens as long as their first blocks differ. They are ordered by
the packed tokens of their first block, so the one that shares the most with a given run is a
neighbour of the place where that run would stand.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import count

from kvstore.blocks.pool import BlockPool
from kvstore.blocks.table import blocks_for
from kvstore.index.continuation import continuation
from kvstore.index.eviction_queue import EvictionQueue
from kvstore.index.in_flight import Checkpoint, InFlight, InFlightPrefixes, Probe
from kvstore.index.prefix_index import PrefixIndex
from kvstore.index.radix_node import Match, Node, Root, each_below
from kvstore.tokens import TOKEN_BYTES, common_tokens
from kvstore.types import BlockId, Finding, Namespace


class RadixTree(PrefixIndex):
    """Indexes the blocks of `pool`, each of `block_size` tokens, by the tokens that they hold.

    The tree keeps a reference to each block that it indexes, and evicts from the leaves. It tells
    its `observers` of each change. `clock` never goes back: what was used last is what it says.
    """

    def __init__(
        self, pool: BlockPool, block_size: int, clock: Callable[[], float] | None = None
    ) -> None:
        super().__init__()
        self._pool = pool
        self._block_size = block_size
        self._block_bytes = block_size * TOKEN_BYTES
        self._roots: dict[Namespace, Root] = {}
        self._node_of: dict[BlockId, Node] = {}
        self._queue = EvictionQueue(self._is_evictable)
        self._serials = count()
        self._clock = clock or count(1).__next__
        self._now = 0.0  # of the operation that runs
        self._n_nodes = 0

    @property
    def n_nodes(self) -> int:
        return self._n_nodes

    def match(self, namespace: Namespace, packed: bytes) -> Match:
        n_tokens, blocks, path = 0, list[BlockId](), list[Node]()
        node: Node | None = self._roots.get(namespace)
        while node is not None:
            node, common = self._closest(node, packed, n_tokens * TOKEN_BYTES)
            if node is None:
                break
            path.append(node)
            n_tokens += common
            blocks += node.blocks[: blocks_for(common, self._block_size)]
            if common * TOKEN_BYTES < len(node.packed):
                break
        return Match(n_tokens, tuple(blocks), tuple(path))

    def continuation(self, namespace: Namespace, packed: bytes, most: int) -> tuple[int, ...]:
        root = self._roots.get(namespace)
        return continuation(root, packed, most, self._block_bytes) if root else ()

    def has_whole(self, block: BlockId) -> bool:
        node = self._node_of.get(block)
        if node is None:
            return False
        return node.blocks[-1] != block or len(node.packed) == len(node.blocks) * self._block_bytes

    def find_behind(self, block: BlockId, packed: bytes) -> BlockId | None:
        node: Node | None = self._node_of[block]
        assert node is not None
        above = node.blocks.index(block) + 1 if node.blocks[-1] != block else len(node.blocks)
        if above < len(node.blocks):
            common = self._common_behind(node, above, packed)
        else:
            above = 0
            node, common = self._closest(node, packed, 0)
        return node.blocks[above] if node and common * TOKEN_BYTES == len(packed) else None

    def touch(self, match: Match) -> None:
        """An edge that was matched in part is split, so that the rest of it keeps its own age."""
        self._now = self._clock()
        matched_blocks = len(match.blocks)
        for node in match.path:
            if matched_blocks < len(node.blocks):
                self._split(node, matched_blocks)
            node.last_used = self._now
            matched_blocks -= len(node.blocks)
        if match.path:
            self.observers.used(match.path[-1], match.n_tokens)

    def insert(
        self, namespace: Namespace, packed: bytes, blocks: Sequence[BlockId]
    ) -> tuple[BlockId, ...]:
        """See PrefixIndex.insert. A tail that an indexed block covers is not indexed; a tail that
        the new blocks cover is forgotten.
        """
        self._now = self._clock()
        return self._insert(self._root(namespace), packed, blocks)

    def insert_behind(
        self, block: BlockId, packed: bytes, blocks: Sequence[BlockId]
    ) -> tuple[BlockId, ...]:
        """Costs what is new, however deep the block stands."""
        self._now = self._clock()
        node = self._node_of[block]
        node.last_used = self._now
        if node.blocks[-1] == block:
            return self._insert(node, packed, blocks) if packed else ()
        above = node.blocks.index(block) + 1
        common = self._common_behind(node, above, packed)
        whole = common // self._block_size
        equal = tuple(node.blocks[above : above + whole])
        if common * TOKEN_BYTES == len(packed):
            return equal
        if above + whole < len(node.blocks):
            self._split(node, above + whole)
        start = whole * self._block_bytes
        return equal + self._insert(node, packed[start:], blocks[whole:])

    def evict(self) -> BlockId | None:
        """Forget the last block of the least recently used leaf that no table holds.

        O(log n), amortised.
        """
        leaf = self._queue.first()
        return None if leaf is None else self._trim(leaf)

    def offer(self, blocks: Sequence[BlockId]) -> None:
        for block in blocks:
            node = self._node_of[block]
            if node.blocks[-1] == block:
                self._queue.offer(node)

    def clear(self, namespace: Namespace | None = None) -> int:
        free_before = self._pool.n_free
        roots = list(self._roots) if namespace is None else [namespace]
        for name in roots:
            root = self._roots.pop(name, None)
            pending = list(root.children) if root else []
            while pending:
                node = pending.pop()
                pending += node.children
                self._forget(node)
            if root:
                self.observers.cleared(name)
        return self._pool.n_free - free_before

    def walk(self) -> Iterator[tuple[Namespace, bytes, Node]]:
        for namespace, root in self._roots.items():
            pending = [(b"", child) for child in root.children]
            while pending:
                prefix, node = pending.pop()
                path = prefix + node.packed
                yield namespace, path, node
                pending += [(path, child) for child in node.children]

    def nodes(self) -> Iterator[Node]:
        """Every node as it is when it comes up, parents first, while the tree may change.

        Together with what observers are told meanwhile that is the tree: a node whose parent has
        not come up yet will come up, and no other.
        """
        return each_below([child for root in self._roots.values() for child in root.children])

    def node_of(self, block: BlockId) -> Node | None:
        return self._node_of.get(block)

    def next_evicted(self, n: int) -> Sequence[Node]:
        """Up to `n` leaves in the order of their eviction; see EvictionQueue.next."""
        return self._queue.next(n)

    @property
    def namespaces(self) -> Sequence[Namespace]:
        return tuple(self._roots)

    def problems(self) -> Iterator[Finding]:
        """What does not add up besides the nodes: the queue of those that can be evicted."""
        return self._queue.problems(node for _, _, node in self.walk())

    def in_flight(self, probe: Probe, checkpoint: Checkpoint) -> InFlight:
        return InFlightPrefixes(self._block_size, probe, checkpoint)

    def _root(self, namespace: Namespace) -> Root:
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Root(next(self._serials), namespace)
        return root

    def _first_block(self, node: Node) -> bytes:
        return bytes(node.packed[: self._block_bytes])

    def _closest(self, node: Node, packed: bytes, start: int) -> tuple[Node | None, int]:
        """The child whose edge shares most tokens with `packed[start:]`, and how many (over 0)."""
        children = node.children
        first = packed[start : start + self._block_bytes]
        at = bisect_left(children, first, key=self._first_block)
        if at < len(children) and packed.startswith(children[at].packed, start):
            return children[at], len(children[at].packed) // TOKEN_BYTES
        best, most = None, 0
        for child in children[max(at - 1, 0) : at + 1]:
            common = common_tokens(packed[start : start + len(child.packed)], bytes(child.packed))
            if common > most:
                best, most = child, common
        return best, most

    def _common_behind(self, node: Node, n_blocks: int, packed: bytes) -> int:
        """How many tokens `packed` shares with the edge behind its first `n_blocks` blocks."""
        start = n_blocks * self._block_bytes
        run = bytes(node.packed[start : start + len(packed)])
        return common_tokens(packed[: len(run)], run)

    def _insert(self, node: Node, packed: bytes, blocks: Sequence[BlockId]) -> tuple[BlockId, ...]:
        """See `insert`; all is below the lower end of `node`."""
        equal = list[BlockId]()
        while True:
            start = len(equal) * self._block_bytes
            child, common = self._closest(node, packed, start)
            whole = common // self._block_size
            is_covered = start + common * TOKEN_BYTES == len(packed)
            if child is None or (whole == 0 and not is_covered):
                self._drop_covered_tail(child, common)
                self._grow(node, packed[start:], blocks[len(equal) :])
                break
            equal += child.blocks[:whole]
            if whole < len(child.blocks) and not is_covered:
                self._split(child, whole)
            child.last_used = self._now
            if is_covered:
                break
            node = child
        return tuple(equal)

    def _drop_covered_tail(self, child: Node | None, common: int) -> None:
        """Forget a child that is no more than a tail of `common` tokens.

        The block that is about to be indexed beside it holds these tokens too, and more.
        """
        if child is not None and common * TOKEN_BYTES == len(child.packed):
            self._unlink(child)

    def _grow(self, node: Node, packed: bytes, blocks: Sequence[BlockId]) -> None:
        """Index `blocks` below `node`: on its own edge if it is a leaf, else in a new child."""
        if isinstance(node, Root) or node.children:
            node = self._add_child(node, packed)
        else:
            node.packed += packed
        node.last_used = self._now
        first = len(node.blocks)
        node.blocks += blocks
        for block in blocks:
            self._pool.cache(block)
            self._node_of[block] = node
        self.observers.stored(node, first)

    def _add_child(self, parent: Node, packed: bytes) -> Node:
        child = Node(next(self._serials), parent.namespace, parent, packed, self._now)
        at = bisect_left(parent.children, self._first_block(child), key=self._first_block)
        parent.children.insert(at, child)
        self._n_nodes += 1
        return child

    def _split(self, node: Node, n_blocks: int) -> None:
        """Cut the edge behind its first `n_blocks` blocks; `node` stays the upper part."""
        cut = n_blocks * self._block_bytes
        tokens = node.packed[cut:]
        lower = Node(next(self._serials), node.namespace, node, tokens, node.last_used)
        lower.blocks, lower.children = node.blocks[n_blocks:], node.children
        for child in lower.children:
            child.parent = lower
        for block in lower.blocks:
            self._node_of[block] = lower
        node.blocks, node.children = node.blocks[:n_blocks], [lower]
        del node.packed[cut:]
        self._n_nodes += 1
        self._queue.offer(lower)
        self.observers.split(node, lower)

    def _is_evictable(self, node: Node) -> bool:
        return not node.children and self._pool.ref_count(node.blocks[-1]) == 0

    def _trim(self, leaf: Node) -> BlockId:
        """Forget a leaf's last block, and with its only one the leaf."""
        block = leaf.blocks[-1]
        if len(leaf.blocks) == 1:
            self._prune(leaf)
        else:
            leaf.blocks.pop()
            del leaf.packed[len(leaf.blocks) * self._block_bytes :]
            del self._node_of[block]
            self._pool.uncache(block)
            self.observers.removed(leaf, 1)
        return block

    def _prune(self, leaf: Node) -> None:
        """Take a leaf out of the tree, and the root with its only one."""
        parent = self._unlink(leaf)
        if not isinstance(parent, Root):
            self._queue.offer(parent)
        elif not parent.children:
            del self._roots[parent.namespace]

    def _unlink(self, leaf: Node) -> Node:
        """Take a leaf from its parent, which is returned."""
        parent = leaf.parent
        assert parent is not None, "a root is no leaf"
        parent.last_used = max(parent.last_used, leaf.last_used)  # who used the one used the other
        at = bisect_left(parent.children, self._first_block(leaf), key=self._first_block)
        del parent.children[at]
        n_blocks = len(leaf.blocks)
        self._forget(leaf)
        self.observers.removed(leaf, n_blocks)
        return parent

    def _forget(self, node: Node) -> None:
        """Drop a node's references."""
        for block in node.blocks:
            del self._node_of[block]
            self._pool.uncache(block)
        node.blocks, node.children = [], []
        self._n_nodes -= 1
        self._queue.leave(node)
