"""The prefix cache's index: a path-compressed radix tree from token prefixes to blocks.

A node is one edge of the tree: a run of blocks with their tokens. Nodes split at block boundaries
only. The last block of a leaf may be a tail, a block that is partly filled.

    root ── [sys sys sys] ─┬─ [user A | answer | ta]      a leaf with a tail
                           └─ [user B]

Siblings may begin with the same tokens as long as their first blocks differ. They are sorted by the
packed tokens of their first block, so the child that shares most with a run of tokens is next to
the place where that run would be inserted.

The node is the only record of a prefix: it has the hashes by which the disk cache knows its blocks,
and the sums over its subtree from which the dashboard's picture is drawn. Sums are brought up to
date when one is drawn: nothing that a step does looks at all ancestors of a node.
"""

import heapq
import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice, takewhile

from kvstore.node import (
    Adoption,
    BlockEvent,
    Change,
    Match,
    NamespaceCleared,
    Node,
    TreeChange,
    add_up,
    with_descendants,
)
from kvstore.pool import BlockPool, blocks_for
from kvstore.tokens import TOKEN_BYTES, Digest, child_digests, common_tokens, root_digest, unpacked
from kvstore.types import BlockId, Finding, Namespace

MAX_ADOPTIONS = 32
"""How many of the latest adoptions the tree remembers, for the dashboard."""

MAX_REPAIRS = 64
"""How many outdated entries of the eviction queue one look ahead repairs."""

MAX_BRANCHES = 64
"""How many children that begin alike are compared by their last use, the first by their tokens."""

YOUNGER_LEVELS = 16
"""How many nodes of a path a use makes younger, from its end up. The others are as young as their
descendants when sums are next added up, or at the latest when these have been evicted."""


class RadixTree:
    """Indexes the blocks of `pool`, each of `block_size` tokens, by the tokens that they hold.

    The tree keeps a reference to each indexed block and evicts from the leaves. What is cleared is
    no longer found, and gives its blocks back with `forget_cleared`. `n_changes` grows with every
    operation that may change a node; `n_nodes` counts cleared ones too. `journal`: the changes that
    the disk cache has not looked at yet, in order; None without a disk cache. `block_events`: the
    facts about whole blocks that have not been taken yet, in order; None unless they are published.
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
        self._node_of: dict[BlockId, Node] = {}  # cleared nodes included
        self._cleared: list[Node] = []  # a stack; their descendants are cleared as well
        self._queue: list[tuple[float, int, Node]] = []  # a heap; see `_enqueue`
        self._serials = count()
        self._clock = clock or count(1).__next__
        self._now = 0.0  # the time of the current operation
        self.hashes_blocks = hashes_blocks
        self.journal: list[TreeChange] | None = None
        self.block_events: list[BlockEvent] | None = None
        self.adoptions = deque[Adoption](maxlen=MAX_ADOPTIONS)
        self.n_changes = 0
        self.n_nodes = 0

    def match(self, namespace: Namespace, packed: bytes) -> Match:
        """The longest prefix of `packed` that is indexed. Changes nothing, not even recency."""
        n_tokens, blocks = 0, list[BlockId]()
        node: Node | None = self.roots.get(namespace)
        while node is not None:
            node, common = self._closest(node, packed, n_tokens * TOKEN_BYTES)
            if node is None:
                break
            n_tokens += common
            blocks += node.blocks[: blocks_for(common, self._block_size)]
            if common * TOKEN_BYTES < len(node.packed):
                break
        return Match(n_tokens, tuple(blocks))

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
        node = self.node_of(block)
        if node is None:
            return False
        return node.blocks[-1] != block or len(node.packed) == len(node.blocks) * self._block_bytes

    def touch(self, match: Match) -> None:
        """A lease adopts `match`: make it the most recently used.

        Splits a node that was matched in part, so that the remaining part keeps its own age.
        """
        if not match.blocks:
            return
        self._begin_change()
        last = match.blocks[-1]
        node = self._node_of[last]
        n_matched = node.blocks.index(last) + 1
        if n_matched < len(node.blocks):
            self._split(node, n_matched)
        self._use(node)
        self.adoptions.append(Adoption(last, match.n_tokens, self._now))
        self._note(Change.ADOPTED, node)

    def attached(self, block: BlockId) -> None:
        """A group has attached one more slot to the block, which may be indexed: it is new again
        for the disk cache, and so is what follows it in its node.
        """
        node = self.node_of(block)
        if node is not None:
            if node.n_saved:
                node.n_saved = min(node.n_saved, node.blocks.index(block))
            self._note(Change.GROWN, node)

    def insert(
        self,
        namespace: Namespace,
        packed: bytes,
        blocks: Sequence[BlockId],
        after: BlockId | None = None,
    ) -> tuple[BlockId, ...]:
        """Index `blocks` under the tokens that they hold. The last may be a tail.

        They follow the whole block `after`, which is indexed, so that the cost does not grow with
        the number of blocks before it. With None they are the first of the namespace.

        Where an equal whole block is indexed already, that one stays. Returns these equal blocks, a
        run from the first block on, for the caller to use in place of its own. A tail that an
        indexed block covers is not indexed; a tail that the new blocks cover is dropped.
        """
        self._begin_change()
        node = self._root(namespace) if after is None else self._node_of[after]
        above = len(node.blocks)
        if after is not None and node.blocks[-1] != after:
            above = node.blocks.index(after) + 1
        if above == len(node.blocks) or not packed:
            node.last_used = self._now
        equal = list[BlockId]()
        while packed:
            start = len(equal) * self._block_bytes
            child: Node | None = node
            if above < len(node.blocks):
                below = above * self._block_bytes
                run = bytes(node.packed[below : below + len(packed)])
                common = common_tokens(packed, run)
            else:
                child, common, above = *self._closest(node, packed, start), 0
            whole = above + common // self._block_size
            is_covered = start + common * TOKEN_BYTES == len(packed)
            if child is None or (whole == 0 and not is_covered):
                if child is not None and common * TOKEN_BYTES == len(child.packed):
                    self._unlink(child)  # a tail: the new block holds its tokens and more
                self._grow(node, packed[start:], blocks[len(equal) :])
                break
            equal += child.blocks[above:whole]
            if whole < len(child.blocks) and not is_covered:
                self._split(child, whole)
            child.last_used = self._now
            if is_covered:
                break
            node, above = child, whole
        return tuple(equal)

    def evict(self) -> BlockId | None:
        """Drop the last block of the least recently used leaf that no block table lists.

        Returns the block, which is free now, or None if nothing can be evicted. O(log n) amortised.
        """
        leaf: Node | None = None
        while leaf is None:
            if not self._queue:
                return None
            leaf = self._settled()
        self.n_changes += 1
        block = leaf.blocks[-1]
        if len(leaf.blocks) == 1:
            parent = self._unlink(leaf)
            if parent.parent is not None:
                self._enqueue(parent)
            elif not parent.children:
                del self.roots[parent.namespace]
        else:
            if self.block_events is not None:
                self.block_events += leaf.removed(self._block_size, len(leaf.blocks) - 1)
            left_bytes = (len(leaf.blocks) - 1) * self._block_bytes
            self._outdate(leaf)
            del leaf.packed[left_bytes:], leaf.blocks[-1], leaf.hashes[-1:]
            leaf.n_saved = min(leaf.n_saved, len(leaf.blocks))
            del self._node_of[block]
            self._pool.uncache(block)
        return block

    def offer(self, blocks: Sequence[BlockId]) -> None:
        """No block table lists these indexed blocks any more: they can be evicted."""
        for block in blocks:
            node = self._node_of[block]
            if node.blocks[-1] == block:
                self._enqueue(node)

    def clear(self, namespace: Namespace | None = None) -> None:
        """Take one namespace, or all, from the index. Its blocks stay cached until
        `forget_cleared` has come to them.
        """
        self.n_changes += 1
        for name in list(self.roots) if namespace is None else self.roots.keys() & {namespace}:
            root = self.roots.pop(name)
            root.is_cleared = True
            self._cleared += root.children
            if self.block_events is not None:
                self.block_events.append(NamespaceCleared(name))
        for adoption in [each for each in self.adoptions if self.node_of(each.block) is None]:
            self.adoptions.remove(adoption)

    def forget_cleared(self, most: float = math.inf) -> bool:
        """Drop the references of cleared nodes to some `most` blocks, or one node's if these are
        more. Returns whether there was a node.
        """
        was_there = bool(self._cleared)
        while self._cleared and most > 0:
            most -= 1 + len(self._cleared[-1].blocks)
            self._forget_cleared(self._cleared.pop())
        self._compact()
        return was_there

    def add_up(self, most: float = math.inf) -> bool:
        """Bring the `subtree_` sums of at most `most` nodes up to date, leaves first. Returns
        whether all are up to date.
        """
        return add_up(self.roots.values(), most)

    def nodes(self) -> Iterator[Node]:
        """Each node, parents first."""
        for root in self.roots.values():
            yield from with_descendants(root.children)

    def cleared_nodes(self) -> Iterator[Node]:
        """Each node that has been cleared and still has its blocks."""
        return (node for node in with_descendants(self._cleared) if node.blocks)

    def node_of(self, block: BlockId) -> Node | None:
        """The node that has the block, if the block is indexed."""
        node = self._node_of.get(block)
        return None if node is None or node.root.is_cleared else node

    def next_evicted(self, n: int) -> Sequence[Node]:
        """Up to `n` leaves in the order of their eviction.

        Returns fewer if more than MAX_REPAIRS entries of the queue are outdated, and repairs these.
        """
        found = list[tuple[float, int, Node]]()
        for _ in range(n + MAX_REPAIRS):
            if len(found) == n or not self._queue:
                break
            if self._settled() is not None:
                found.append(heapq.heappop(self._queue))
        for entry in found:
            heapq.heappush(self._queue, entry)
        return [node for _, _, node in found]

    def problems(self) -> Iterator[Finding]:
        """Contradictions in the hashes, in the counts of saved blocks, and in the eviction
        queue.
        """
        for root in self.roots.values():
            if root.hashes != ([root_digest(root.namespace)] if self.hashes_blocks else []):
                yield f"{root.namespace}: not its hash"
        queued = Counter(node for _, _, node in self._queue)
        for node in self.nodes():
            if node.hashes != self._digests(node, 0, bytes(node.packed)):
                yield f"edge {node.serial}: hashes of other tokens"
            if node.n_saved > len(node.blocks):
                yield f"edge {node.serial}: {node.n_saved} blocks saved of {len(node.blocks)}"
            if node.is_queued != queued[node]:
                yield f"edge {node.serial}: queued is {node.is_queued}, in it {queued[node]} times"
            if not node.is_queued and self._is_evictable(node):
                yield f"edge {node.serial}: could be evicted, but is not in the queue"
            yield None
        if len(self._queue) > 2 * self.n_nodes:
            yield f"{len(self._queue)} queued of {self.n_nodes} nodes"

    def _note(self, change: Change, node: Node, lower: Node | None = None) -> None:
        if self.journal is not None:
            self.journal.append(TreeChange(change, node, lower))

    def _begin_change(self) -> None:
        self._now = self._clock()
        self.n_changes += 1

    def _root(self, namespace: Namespace) -> Node:
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = Node(next(self._serials), namespace, None)
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
            return children[at], children[at].n_tokens
        best, most = None, 0
        for child in children[max(at - 1, 0) : at + 1]:
            rest = packed[start : start + len(child.packed)]
            if child.packed.startswith(rest):  # saves a copy of a long node
                common = len(rest) // TOKEN_BYTES
            else:
                common = common_tokens(rest, bytes(child.packed))
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

    def _grow(self, node: Node, packed: bytes, blocks: Sequence[BlockId]) -> None:
        """Index `blocks` after `node`: as part of it if it is a leaf, else in a new child."""
        is_new = node.parent is None or bool(node.children)
        if is_new:
            parent = node
            node = Node(next(self._serials), parent.namespace, parent, bytearray(packed), self._now)
            at = bisect_left(parent.children, self._first_block(node), key=self._first_block)
            parent.children.insert(at, node)
        else:
            node.packed += packed
        first = len(node.blocks)
        node.hashes += self._digests(node, first, packed)
        node.blocks += blocks
        for block in blocks:
            if (cleared := self._node_of.get(block)) is not None:
                self._forget_cleared(cleared)
            self._pool.cache(block)
            self._node_of[block] = node
        self.n_nodes += is_new
        self._use(node)
        self._note(Change.GROWN, node)
        if self.block_events is not None:
            self.block_events += node.stored(self._block_size, first)

    def _digests(self, node: Node, first: int, packed: bytes) -> list[Digest]:
        """The hashes of the node's blocks from `first` on, which hold the tokens `packed`."""
        if not self.hashes_blocks:
            return []
        return child_digests(node.parent_hash(first), packed, self._block_size)

    def _use(self, node: Node) -> None:
        """The node has been used, or has grown."""
        younger: Node | None = node
        for _ in range(YOUNGER_LEVELS):
            if younger is None or not younger.blocks:  # a root
                break
            younger.last_used = self._now
            younger = younger.parent
        self._outdate(node)

    def _outdate(self, node: Node | None) -> None:
        """The sums of a node have changed. O(1) amortised: where an ancestor's are known to be
        outdated, so are those of all above it.
        """
        while node is not None and not node.is_outdated:
            node.is_outdated = True
            node = node.parent

    def _split(self, node: Node, n_blocks: int) -> None:
        """Cut `node` after its first `n_blocks` blocks; it stays the upper part."""
        cut = n_blocks * self._block_bytes
        lower = Node(next(self._serials), node.namespace, node, node.packed[cut:], node.last_used)
        lower.blocks, lower.children = node.blocks[n_blocks:], node.children
        lower.hashes = node.hashes[n_blocks:]
        for child in lower.children:
            child.parent = lower
        for block in lower.blocks:
            self._node_of[block] = lower
        node.children = [lower]
        del node.packed[cut:], node.blocks[n_blocks:], node.hashes[n_blocks:]
        self.n_nodes += 1
        self._outdate(lower)
        lower.n_saved = max(node.n_saved - n_blocks, 0)
        node.n_saved = min(node.n_saved, n_blocks)
        self._enqueue(lower)
        self._note(Change.SPLIT, node, lower)

    def _is_evictable(self, node: Node) -> bool:
        return node.is_indexed and not node.children and self._pool.ref_count(node.blocks[-1]) == 0

    def _enqueue(self, node: Node) -> None:
        """Queue the node for eviction, if it can be evicted and has no entry yet. The queue is a
        heap of the last use, the serial and the node. An entry that becomes outdated stays until it
        is on top.
        """
        if not node.is_queued and self._is_evictable(node):
            node.is_queued = True
            heapq.heappush(self._queue, (node.last_used, node.serial, node))
            self._compact()

    def _settled(self) -> Node | None:
        """The first node of the queue, if its entry is up to date. Otherwise repairs or removes the
        entry.
        """
        last_used, _, node = self._queue[0]
        if not self._is_evictable(node):
            heapq.heappop(self._queue)
            node.is_queued = False
        elif last_used < node.last_used:
            heapq.heapreplace(self._queue, (node.last_used, node.serial, node))
        else:
            return node
        return None

    def _compact(self) -> None:
        """Remove the entries of nodes that have left the tree once the queue has more than two
        entries for each node, so that the cost of an operation depends on the tree as it is now.
        """
        if len(self._queue) > 2 * self.n_nodes:
            self._queue = [entry for entry in self._queue if entry[2].is_indexed]
            heapq.heapify(self._queue)

    def _unlink(self, leaf: Node) -> Node:
        """Remove a leaf from the tree. Returns its parent."""
        parent = leaf.parent
        assert parent is not None, "a root is no leaf"
        parent.last_used = max(parent.last_used, leaf.last_used)
        at = bisect_left(parent.children, self._first_block(leaf), key=self._first_block)
        del parent.children[at]
        self.n_nodes -= 1
        self._outdate(parent)
        if self.block_events is not None:
            self.block_events += leaf.removed(self._block_size)
        self._forget(leaf)
        self._compact()
        return parent

    def _forget_cleared(self, node: Node) -> None:
        """Drop the references of a cleared node, which may have been done before. Its descendants
        are next.
        """
        if node.blocks:
            self._cleared += node.children
            self.n_nodes -= 1
            self._forget(node)

    def _forget(self, node: Node) -> None:
        """Drop the references of a node that leaves the tree."""
        for block in node.blocks:
            del self._node_of[block]
            self._pool.uncache(block)
        node.packed, node.blocks, node.hashes, node.children = bytearray(), [], [], []
