"""The prefix cache's index: a path-compressed radix tree from token prefixes to blocks.

A node is one edge of the tree: a run of blocks with their tokens. Nodes split at block boundaries
only. The last block of a leaf may be a tail, a block that is partly filled.

    root ── [sys sys sys] ─┬─ [user A | answer | ta]      a leaf with a tail
                           └─ [user B]

Siblings may begin with the same tokens as long as their first blocks differ. They are sorted by the
packed tokens of their first block, so the child that shares most with a run of tokens is next to
the place where that run would be inserted.

The node is the only record of a prefix: it has the hashes by which the disk cache knows its blocks,
and the sums over its subtree from which the dashboard's picture is drawn.
"""

import heapq
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, count, islice, takewhile
from typing import NamedTuple, Protocol

from kvstore.pool import BlockPool, blocks_for
from kvstore.tokens import (
    TOKEN_BYTES,
    Digest,
    child_digest,
    common_tokens,
    root_digest,
    unpacked,
)
from kvstore.types import BlockId, Finding, Namespace


class Node:
    """A run of blocks that follows the blocks of `parent`. `packed` holds their tokens.

    `hashes` has the hash of each block, tails included, if the tree computes hashes. The `subtree_`
    sums are over the node and its descendants. A node that has left the tree has no blocks. The
    root of a namespace has no parent and no blocks; its one hash is that of the namespace.
    """

    __slots__ = (
        *("blocks", "children", "hashes", "last_used", "namespace", "packed", "parent", "queued"),
        *("serial", "subtree_blocks", "subtree_nodes", "subtree_tokens"),
    )

    def __init__(
        self, serial: int, namespace: Namespace, parent: "Node | None", packed: bytes, now: float
    ) -> None:
        self.serial = serial
        self.namespace = namespace
        self.parent = parent
        self.packed = bytearray(packed)
        self.blocks: list[BlockId] = []
        self.hashes: list[Digest] = []
        self.children: list[Node] = []
        self.last_used = now
        self.queued = False  # has its one entry in the eviction queue
        self.subtree_nodes = self.subtree_tokens = self.subtree_blocks = 0

    @property
    def n_tokens(self) -> int:
        return len(self.packed) // TOKEN_BYTES

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


@dataclass(frozen=True, slots=True)
class Match:
    """The longest indexed prefix of a run of tokens.

    `blocks` hold its `n_tokens` tokens. The last block may hold more tokens, or go on differently.
    """

    n_tokens: int
    blocks: tuple[BlockId, ...]
    path: tuple[Node, ...]

    def until(self, n_tokens: int, block_size: int) -> "Match":
        """The part of the match that covers the first `n_tokens` tokens."""
        blocks = self.blocks[: blocks_for(n_tokens, block_size)]
        above = accumulate((len(node.blocks) for node in self.path), initial=0)
        path = [node for node, start in zip(self.path, above, strict=False) if start < len(blocks)]
        return Match(n_tokens, blocks, tuple(path))


NO_MATCH = Match(0, (), ())


class TreeObserver(Protocol):
    """Is notified of changes. Must neither block nor change the tree."""

    def stored(self, node: Node, first: int) -> None:
        """`node.blocks[first:]` are new. With `first` 0 the node is new, too."""

    def split(self, node: Node, lower: Node) -> None:
        """The end of `node`, with all that was below, is now `lower`, the only child of `node`."""

    def used(self, node: Node) -> None:
        """A lease has adopted the path that ends with `node`."""

    def removed(self, node: Node) -> None:
        """The node, a leaf, has left the tree."""

    def cleared(self, namespace: Namespace) -> None:
        """All nodes of the namespace have left the tree."""


class Adoption(NamedTuple):
    """A lease adopted `n_tokens` tokens of cached prefix, of which `block` holds the last."""

    block: BlockId
    n_tokens: int
    seconds: float  # of the tree's clock


MAX_ADOPTIONS = 32
"""How many of the latest adoptions the tree remembers, for the dashboard."""

TRIES = 64


class EvictionQueue:
    """Leaves in order of eviction, the least recently used first. A node has at most one entry.

    Each node that becomes evictable must be `offer`ed. Entries of nodes that left the tree stay
    until they reach the top or are more than half of the queue, so the amortised cost of an
    operation depends on the tree as it is now.
    """

    def __init__(self, may_go: Callable[[Node], bool]) -> None:
        """`may_go`: whether a node that is in the tree can be evicted now."""
        self._may_go = may_go
        self._heap: list[tuple[float, int, Node]] = []  # (last_used, serial, leaf)
        self._n_left = 0

    def __len__(self) -> int:
        """The number of entries, including those of nodes that have left the tree."""
        return len(self._heap)

    def offer(self, node: Node) -> None:
        """Queue the node if it can be evicted and has no entry yet."""
        if not node.queued and self._may_go(node):
            node.queued = True
            heapq.heappush(self._heap, (node.last_used, node.serial, node))

    def leave(self, node: Node) -> None:
        """The node has left the tree."""
        if node.queued:
            self._n_left += 1
            self._compact()

    def first(self) -> Node | None:
        """The least recently used node that can be evicted. It keeps its entry."""
        while self._heap:
            if (node := self._settled()) is not None:
                return node
        return None

    def next(self, n: int) -> list[Node]:
        """Up to `n` nodes that can be evicted, in order. They keep their entries.

        Repairs at most TRIES outdated entries, and returns fewer nodes if more are outdated.
        """
        found = list[tuple[float, int, Node]]()
        for _ in range(n + TRIES):
            if len(found) == n or not self._heap:
                break
            if self._settled() is not None:
                found.append(heapq.heappop(self._heap))
        for entry in found:
            heapq.heappush(self._heap, entry)
        return [node for _, _, node in found]

    def problems(self, nodes: Iterable[Node]) -> Iterator[Finding]:
        """Contradictions within the queue, given all nodes of the tree."""
        queued = Counter[Node]()
        for _, _, node in self._heap:
            queued[node] += 1
            yield None
        for node in nodes:
            if node.queued != queued[node]:
                yield f"edge {node.serial}: queued is {node.queued}, in the queue {queued[node]}"
            if node.blocks and not node.queued and self._may_go(node):
                yield f"edge {node.serial}: could be evicted, but is not in the queue"
            yield None
        n_left = sum(not node.blocks for node in queued)
        if n_left != self._n_left or 2 * n_left > len(self._heap):
            yield f"{n_left} of {len(self._heap)} queued have left the tree, {self._n_left} counted"

    def _settled(self) -> Node | None:
        """The node on top if its entry is up to date. Otherwise repairs or removes the entry."""
        last_used, _, node = self._heap[0]
        if not node.blocks:
            heapq.heappop(self._heap)
            self._n_left -= 1
        elif not self._may_go(node):
            heapq.heappop(self._heap)
            node.queued = False
            self._compact()
        elif last_used < node.last_used:
            heapq.heapreplace(self._heap, (node.last_used, node.serial, node))
        else:
            return node
        return None

    def _compact(self) -> None:
        if 2 * self._n_left > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[2].blocks]
            heapq.heapify(self._heap)
            self._n_left = 0


MAX_BRANCHES = 64
"""How many children that begin alike are compared by their last use, the first by their tokens."""


class RadixTree:
    """Indexes the blocks of `pool`, each of `block_size` tokens, by the tokens that they hold.

    The tree keeps a reference to each indexed block and evicts from the leaves. `n_changes` grows
    with every operation that may change a node. `observer` is notified of changes.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        clock: Callable[[], float] | None = None,
        *,
        hashes_blocks: bool = False,
    ) -> None:
        """`clock` must never go back; without it a counter orders uses. With `hashes_blocks` each
        node has the hashes of its blocks.
        """
        self._pool = pool
        self._block_size = block_size
        self._block_bytes = block_size * TOKEN_BYTES
        self.roots: dict[Namespace, Node] = {}  # of the namespaces that have something indexed
        self._node_of: dict[BlockId, Node] = {}
        self._queue = EvictionQueue(self._is_evictable)
        self._serials = count()
        self._clock = clock or count(1).__next__
        self._now = 0.0  # the time of the current operation
        self.hashes_blocks = hashes_blocks
        self.observer: TreeObserver | None = None
        self.adoptions = deque[Adoption](maxlen=MAX_ADOPTIONS)
        self.n_changes = 0
        self.n_nodes = 0
        self.n_tokens = 0

    @property
    def n_blocks(self) -> int:
        return len(self._node_of)

    @property
    def namespaces(self) -> Sequence[Namespace]:
        """The namespaces that have something indexed."""
        return tuple(self.roots)

    def match(self, namespace: Namespace, packed: bytes) -> Match:
        """The longest prefix of `packed` that is indexed. Changes nothing, not even recency."""
        n_tokens, blocks, path = 0, list[BlockId](), list[Node]()
        node: Node | None = self.roots.get(namespace)
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
        """Up to `most` cached tokens that follow `packed`; none unless all of it is indexed.

        At a branch the most recently used child is followed. Changes nothing, not even recency.
        """
        node: Node | None = self.roots.get(namespace)
        start, found, most_bytes = 0, bytearray(), most * TOKEN_BYTES
        while node is not None and len(found) < most_bytes:
            node = self._branch(node, packed[start : start + self._block_bytes])
            if node is not None:
                shared = node.packed[: len(packed) - start]
                if not packed.startswith(shared, start):
                    return ()
                start += len(shared)
                found += node.packed[len(shared) : len(shared) + most_bytes]
        return tuple(unpacked(bytes(found[:most_bytes])))  # empty before the end of `packed`

    def has_whole(self, block: BlockId) -> bool:
        """Whether the block is indexed as a whole block, not as a tail."""
        node = self._node_of.get(block)
        if node is None:
            return False
        return node.blocks[-1] != block or len(node.packed) == len(node.blocks) * self._block_bytes

    def find_next_block(self, block: BlockId, packed: bytes) -> BlockId | None:
        """The indexed block that follows a whole `block` and begins with all of `packed`."""
        node: Node | None = self._node_of[block]
        assert node is not None
        above = node.blocks.index(block) + 1 if node.blocks[-1] != block else len(node.blocks)
        if above < len(node.blocks):
            common = self._common_from(node, above, packed)
        else:
            above = 0
            node, common = self._closest(node, packed, 0)
        return node.blocks[above] if node and common * TOKEN_BYTES == len(packed) else None

    def touch(self, match: Match) -> None:
        """A lease adopts `match`: make it the most recently used.

        Splits a node that was matched in part, so that the remaining part keeps its own age.
        """
        if not match.path:
            return
        self._begin_change()
        matched_blocks = len(match.blocks)
        for node in match.path:
            if matched_blocks < len(node.blocks):
                self._split(node, matched_blocks)
            node.last_used = self._now
            matched_blocks -= len(node.blocks)
        self.adoptions.append(Adoption(match.blocks[-1], match.n_tokens, self._now))
        if self.observer is not None:
            self.observer.used(match.path[-1])

    def insert(
        self, namespace: Namespace, packed: bytes, blocks: Sequence[BlockId]
    ) -> tuple[BlockId, ...]:
        """Index `blocks`, at least one, under the tokens that they hold. The last may be a tail.

        Where an equal whole block is indexed already, that one stays. Returns these equal blocks, a
        run from the first block on, for the caller to use in place of its own. A tail that an
        indexed block covers is not indexed; a tail that the new blocks cover is dropped.
        """
        self._begin_change()
        return self._insert(self._root(namespace), packed, blocks)

    def insert_after(
        self, block: BlockId, packed: bytes, blocks: Sequence[BlockId]
    ) -> tuple[BlockId, ...]:
        """Index `blocks` after an indexed whole `block`, as `insert` does.

        `packed` and `blocks` are what follows `block`. The blocks before it are not compared, so
        the cost does not grow with their number.
        """
        self._begin_change()
        node = self._node_of[block]
        node.last_used = self._now
        if node.blocks[-1] == block:
            return self._insert(node, packed, blocks) if packed else ()
        above = node.blocks.index(block) + 1
        common = self._common_from(node, above, packed)
        whole = common // self._block_size
        equal = tuple(node.blocks[above : above + whole])
        if common * TOKEN_BYTES == len(packed):
            return equal
        if above + whole < len(node.blocks):
            self._split(node, above + whole)
        start = whole * self._block_bytes
        return equal + self._insert(node, packed[start:], blocks[whole:])

    def evict(self) -> BlockId | None:
        """Drop the last block of the least recently used leaf that no block table lists.

        Returns the block, which is free now, or None if nothing can be evicted. O(log n) amortised.
        """
        leaf = self._queue.first()
        if leaf is None:
            return None
        self.n_changes += 1
        return self._trim(leaf)

    def offer(self, blocks: Sequence[BlockId]) -> None:
        """No block table lists these indexed blocks any more: they can be evicted."""
        for block in blocks:
            node = self._node_of[block]
            if node.blocks[-1] == block:
                self._queue.offer(node)

    def clear(self, namespace: Namespace | None = None) -> int:
        """Forget one namespace, or all. Returns the number of blocks that became free."""
        free_before = self._pool.n_free
        self.n_changes += 1
        for name in list(self.roots) if namespace is None else [namespace]:
            root = self.roots.pop(name, None)
            if root is None:
                continue
            self.n_nodes -= root.subtree_nodes
            self.n_tokens -= root.subtree_tokens
            pending = list(root.children)
            while pending:
                node = pending.pop()
                pending += node.children
                self._forget(node)
            if self.observer is not None:
                self.observer.cleared(name)
        for adoption in [each for each in self.adoptions if each.block not in self._node_of]:
            self.adoptions.remove(adoption)
        return self._pool.n_free - free_before

    def walk(self) -> Iterator[tuple[Namespace, bytes, Node]]:
        """Each node with the packed tokens from the root to its end, parents first."""
        for namespace, root in self.roots.items():
            pending = [(b"", child) for child in root.children]
            while pending:
                prefix, node = pending.pop()
                path = prefix + node.packed
                yield namespace, path, node
                pending += [(path, child) for child in node.children]

    def nodes(self) -> Iterator[Node]:
        """Each node, parents first."""
        return (node for _, _, node in self.walk())

    def node_of(self, block: BlockId) -> Node | None:
        """The node that has the block, if the block is indexed."""
        return self._node_of.get(block)

    def next_evicted(self, n: int) -> Sequence[Node]:
        """Up to `n` leaves in the order of their eviction; see EvictionQueue.next."""
        return self._queue.next(n)

    def problems(self) -> Iterator[Finding]:
        """Contradictions in sums, hashes and the eviction queue, recounted."""
        total_nodes = total_tokens = 0
        for node in chain(self.roots.values(), self.nodes()):
            is_root = node.parent is None
            total_nodes += not is_root
            total_tokens += node.n_tokens
            sums = (node.subtree_nodes, node.subtree_tokens, node.subtree_blocks)
            recounted = (
                sum((child.subtree_nodes for child in node.children), int(not is_root)),
                sum((child.subtree_tokens for child in node.children), node.n_tokens),
                sum((child.subtree_blocks for child in node.children), len(node.blocks)),
            )
            if sums != recounted:
                yield f"edge {node.serial}: subtree sums {sums}, recounted {recounted}"
            if is_root:
                hashes = [root_digest(node.namespace)] if self.hashes_blocks else []
            else:
                hashes = self._digests(node, 0, bytes(node.packed))
            if node.hashes != hashes:
                yield f"edge {node.serial}: hashes of other tokens"
            yield None
        if (self.n_nodes, self.n_tokens) != (total_nodes, total_tokens):
            yield f"{self.n_nodes} nodes, {self.n_tokens} tokens: {total_nodes}, {total_tokens}"
        yield from self._queue.problems(self.nodes())

    def _begin_change(self) -> None:
        self._now = self._clock()
        self.n_changes += 1

    def _root(self, namespace: Namespace) -> Node:
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = Node(next(self._serials), namespace, None, b"", 0)
            if self.hashes_blocks:
                root.hashes.append(root_digest(namespace))
        return root

    def _first_block(self, node: Node) -> bytes:
        return bytes(node.packed[: self._block_bytes])

    def _closest(self, node: Node, packed: bytes, start: int) -> tuple[Node | None, int]:
        """The child that shares most tokens with `packed[start:]`, and how many (at least one)."""
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

    def _branch(self, node: Node, first: bytes) -> Node | None:
        """The most recently used child that begins with the tokens `first`, at most a block."""
        children = node.children
        at = bisect_left(children, first, key=self._first_block)
        alike = takewhile(
            lambda child: child.packed.startswith(first), islice(children, at, at + MAX_BRANCHES)
        )
        return max(alike, key=lambda child: child.last_used, default=None)

    def _common_from(self, node: Node, n_blocks: int, packed: bytes) -> int:
        """How many tokens `packed` shares with the node after its first `n_blocks` blocks."""
        start = n_blocks * self._block_bytes
        run = bytes(node.packed[start : start + len(packed)])
        return common_tokens(packed[: len(run)], run)

    def _insert(self, node: Node, packed: bytes, blocks: Sequence[BlockId]) -> tuple[BlockId, ...]:
        """Insert below the end of `node`; see `insert`."""
        equal = list[BlockId]()
        while True:
            start = len(equal) * self._block_bytes
            child, common = self._closest(node, packed, start)
            whole = common // self._block_size
            is_covered = start + common * TOKEN_BYTES == len(packed)
            if child is None or (whole == 0 and not is_covered):
                if child is not None and common * TOKEN_BYTES == len(child.packed):
                    self._unlink(child)  # a tail: the new block holds its tokens and more
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

    def _grow(self, node: Node, packed: bytes, blocks: Sequence[BlockId]) -> None:
        """Index `blocks` after `node`: as part of it if it is a leaf, else in a new child."""
        is_new = node.parent is None or bool(node.children)
        if is_new:
            parent = node
            node = Node(next(self._serials), parent.namespace, parent, packed, self._now)
            at = bisect_left(parent.children, self._first_block(node), key=self._first_block)
            parent.children.insert(at, node)
        else:
            node.packed += packed
        first = len(node.blocks)
        node.hashes += self._digests(node, first, packed)
        node.blocks += blocks
        for block in blocks:
            self._pool.cache(block)
            self._node_of[block] = node
        self._count(node, int(is_new), len(packed) // TOKEN_BYTES, len(blocks))
        if self.observer is not None:
            self.observer.stored(node, first)

    def _digests(self, node: Node, first: int, packed: bytes) -> list[Digest]:
        """The hashes of the node's blocks from `first` on, which hold the tokens `packed`."""
        if not self.hashes_blocks:
            return []
        digests = [node.parent_hash(first)]
        for start in range(0, len(packed), self._block_bytes):
            digests.append(child_digest(digests[-1], packed[start : start + self._block_bytes]))
        return digests[1:]

    def _count(self, node: Node | None, nodes: int, tokens: int, blocks: int) -> None:
        """Add to the sums of the tree, of `node` and of its ancestors.

        A node is as young as what is below it, so what grows makes its ancestors younger.
        """
        self.n_nodes += nodes
        self.n_tokens += tokens
        now = self._now if tokens > 0 else 0.0
        while node is not None:
            node.subtree_nodes += nodes
            node.subtree_tokens += tokens
            node.subtree_blocks += blocks
            if now > node.last_used:  # noqa: PLR1730 - max() is slower
                node.last_used = now
            node = node.parent

    def _split(self, node: Node, n_blocks: int) -> None:
        """Cut `node` after its first `n_blocks` blocks; it stays the upper part."""
        cut = n_blocks * self._block_bytes
        tokens = bytes(node.packed[cut:])
        lower = Node(next(self._serials), node.namespace, node, tokens, node.last_used)
        lower.blocks, lower.children = node.blocks[n_blocks:], node.children
        lower.hashes = node.hashes[n_blocks:]
        for child in lower.children:
            child.parent = lower
        for block in lower.blocks:
            self._node_of[block] = lower
        lower.subtree_nodes = node.subtree_nodes
        lower.subtree_tokens = node.subtree_tokens - cut // TOKEN_BYTES
        lower.subtree_blocks = node.subtree_blocks - n_blocks
        node.children = [lower]
        del node.packed[cut:], node.blocks[n_blocks:], node.hashes[n_blocks:]
        self._count(node, 1, 0, 0)
        self._queue.offer(lower)
        if self.observer is not None:
            self.observer.split(node, lower)

    def _is_evictable(self, node: Node) -> bool:
        return not node.children and self._pool.ref_count(node.blocks[-1]) == 0

    def _trim(self, leaf: Node) -> BlockId:
        """Drop the last block of a leaf, and the leaf with its only block."""
        block = leaf.blocks[-1]
        if len(leaf.blocks) == 1:
            parent = self._unlink(leaf)
            if parent.parent is not None:
                self._queue.offer(parent)
            elif not parent.children:
                del self.roots[parent.namespace]
        else:
            left_bytes = (len(leaf.blocks) - 1) * self._block_bytes
            self._count(leaf, 0, (left_bytes - len(leaf.packed)) // TOKEN_BYTES, -1)
            del leaf.packed[left_bytes:], leaf.blocks[-1], leaf.hashes[-1:]
            del self._node_of[block]
            self._pool.uncache(block)
        return block

    def _unlink(self, leaf: Node) -> Node:
        """Remove a leaf from the tree. Returns its parent."""
        parent = leaf.parent
        assert parent is not None, "a root is no leaf"
        parent.last_used = max(parent.last_used, leaf.last_used)
        at = bisect_left(parent.children, self._first_block(leaf), key=self._first_block)
        del parent.children[at]
        self._count(parent, -1, -leaf.n_tokens, -len(leaf.blocks))
        self._forget(leaf)
        if self.observer is not None:
            self.observer.removed(leaf)
        return parent

    def _forget(self, node: Node) -> None:
        """Drop the references of a node that leaves the tree."""
        for block in node.blocks:
            del self._node_of[block]
            self._pool.uncache(block)
        node.blocks, node.hashes, node.children = [], [], []
        self._queue.leave(node)
