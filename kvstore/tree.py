"""The prefix index: a path-compressed radix tree from token prefixes to blocks.

An edge is a run of blocks and their tokens; it belongs to the node at its lower end. Nodes split at
block boundaries alone. A leaf's edge may end in a tail, a block that is only partly filled.

    root ── [sys sys sys] ─┬─ [user A | answer | ta]      a leaf with a tail
                           └─ [user B]

Siblings may begin with the same tokens as long as their first blocks differ. They are ordered by
the packed tokens of their first block, so the one that shares the most with a given run is a
neighbour of the place where that run would stand.
"""

import heapq
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, count, islice, takewhile
from typing import Protocol

from kvstore.in_flight import Checkpoint, InFlight, InFlightPrefixes, Probe
from kvstore.pool import BlockPool, blocks_for
from kvstore.tokens import TOKEN_BYTES, common_tokens, unpacked
from kvstore.types import BlockId, Finding, Namespace


class Node:
    """One edge of the tree. `packed` are its tokens, `blocks` their blocks, in order."""

    __slots__ = (
        *("blocks", "children", "last_used", "namespace", "packed", "parent", "queued", "serial"),
    )

    def __init__(
        self,
        serial: int,
        namespace: Namespace,
        parent: "Node | None",
        packed: bytes | bytearray,
        last_used: float,
    ) -> None:
        self.serial = serial
        self.namespace = namespace
        self.parent = parent
        self.packed = bytearray(packed)
        self.blocks: list[BlockId] = []
        self.children: list[Node] = []
        self.last_used = last_used
        self.queued = False  # has its one entry in the eviction queue

    def token_ids(self, most: int) -> tuple[int, ...]:
        """The first of its tokens, no more than `most`."""
        return tuple(unpacked(bytes(self.packed[: most * TOKEN_BYTES])))


class Root(Node):
    """Where the prefixes of one namespace begin. Has no edge."""

    __slots__ = ()

    def __init__(self, serial: int, namespace: Namespace) -> None:
        super().__init__(serial, namespace, None, b"", 0)


def each_below(pending: list[Node]) -> Iterator[Node]:
    """These nodes and all below them, as they are when they come up; parents first."""
    while pending:
        node = pending.pop()
        if node.blocks:  # else it has left the tree since
            pending += node.children
            yield node


@dataclass(frozen=True, slots=True)
class Match:
    """The longest indexed prefix of a run of tokens.

    `blocks` hold its `n_tokens` tokens; the last one may hold more, or other tokens behind them.
    """

    n_tokens: int
    blocks: tuple[BlockId, ...]
    path: tuple[Node, ...]

    def until(self, n_tokens: int, block_size: int) -> "Match":
        """What there is of it in the first `n_tokens` tokens."""
        blocks = self.blocks[: blocks_for(n_tokens, block_size)]
        above = accumulate((len(node.blocks) for node in self.path), initial=0)
        path = [node for node, start in zip(self.path, above, strict=False) if start < len(blocks)]
        return Match(n_tokens, blocks, tuple(path))


class TreeObserver(Protocol):
    """Must not block, nor change the tree. Parents are told before their children."""

    def stored(self, node: Node, first: int) -> None:
        """`node.blocks[first:]` are new; with `first` 0 the node is. The last may be a tail."""
        ...

    def split(self, node: Node, lower: Node) -> None:
        """What was the end of `node`, with all that was below, is `lower` now, its only child."""
        ...

    def used(self, node: Node, n_tokens: int) -> None:
        """A lease has adopted the first `n_tokens` tokens of the path that ends with `node`."""
        ...

    def removed(self, node: Node, n_blocks: int) -> None:
        """The leaf has lost its last blocks. It has left the tree where `node.blocks` is empty."""
        ...

    def cleared(self, namespace: Namespace) -> None:
        """All nodes of the namespace have left the tree."""
        ...


class Observers:
    """The observers of one tree, called in the order in which they were added."""

    def __init__(self) -> None:
        self._all: tuple[TreeObserver, ...] = ()

    def add(self, observer: TreeObserver) -> None:
        self._all += (observer,)

    def remove(self, observer: TreeObserver) -> None:
        """Does nothing for an observer that was not added."""
        self._all = tuple(each for each in self._all if each is not observer)

    def stored(self, node: Node, first: int) -> None:
        for observer in self._all:
            observer.stored(node, first)

    def split(self, node: Node, lower: Node) -> None:
        for observer in self._all:
            observer.split(node, lower)

    def used(self, node: Node, n_tokens: int) -> None:
        for observer in self._all:
            observer.used(node, n_tokens)

    def removed(self, node: Node, n_blocks: int) -> None:
        for observer in self._all:
            observer.removed(node, n_blocks)

    def cleared(self, namespace: Namespace) -> None:
        for observer in self._all:
            observer.cleared(namespace)


TRIES = 64


class EvictionQueue:
    """Leaves, the least recently used first. Whatever may be evicted must be `offer`ed.

    A node has one entry at most. That of a node that has left the tree stays until it comes up, or
    until such entries are more than the others: what the queue holds and what an operation costs,
    amortised, depends on the tree as it is and not on what it was.
    """

    def __init__(self, may_go: Callable[[Node], bool]) -> None:
        """`may_go`: whether a node that is in the tree can be evicted now."""
        self._may_go = may_go
        self._heap: list[tuple[float, int, Node]] = []  # (last_used, serial, leaf)
        self._n_left = 0

    def __len__(self) -> int:
        """Entries, with those of nodes that have left the tree."""
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
            self._shed()

    def first(self) -> Node | None:
        """The least recently used of those that can be evicted. It keeps its entry."""
        while self._heap:
            if (node := self._settled()) is not None:
                return node
        return None

    def next(self, n: int) -> list[Node]:
        """Up to `n` of those that can be evicted, in order. They keep their entries.

        Brings up to date no more than TRIES entries, and returns fewer where more are out of date.
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
        """What does not add up, given all nodes of the tree."""
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
        """The node on top if its entry is right; else the entry has been put right, or is gone."""
        last_used, _, node = self._heap[0]
        if not node.blocks:
            heapq.heappop(self._heap)
            self._n_left -= 1
        elif not self._may_go(node):
            heapq.heappop(self._heap)
            node.queued = False
            self._shed()
        elif last_used < node.last_used:
            heapq.heapreplace(self._heap, (node.last_used, node.serial, node))
        else:
            return node
        return None

    def _shed(self) -> None:
        if 2 * self._n_left > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[2].blocks]
            heapq.heapify(self._heap)
            self._n_left = 0


MOST_BRANCHES = 64
"""Looked at where so many go on: the first of them by their tokens."""


def continuation(root: Node, packed: bytes, most: int, block_bytes: int) -> tuple[int, ...]:
    """The tokens that follow `packed` below `root`, at most `most`; none if it is not all indexed.

    Where several edges go on the most recently used is followed.
    """
    node: Node | None = root
    start, behind, most_bytes = 0, bytearray(), most * TOKEN_BYTES
    while node is not None and len(behind) < most_bytes:
        node = _branch(node, packed[start : start + block_bytes], block_bytes)
        if node is not None:
            shared = node.packed[: len(packed) - start]
            if not packed.startswith(shared, start):
                return ()
            start += len(shared)
            behind += node.packed[len(shared) : len(shared) + most_bytes]
    return tuple(unpacked(bytes(behind[:most_bytes])))  # empty before the end of `packed`


def _branch(node: Node, first: bytes, block_bytes: int) -> Node | None:
    """The child of most recent use among those that begin with these tokens, a block at most."""
    children = node.children
    at = bisect_left(children, first, key=lambda child: bytes(child.packed[:block_bytes]))
    alike = takewhile(
        lambda child: child.packed.startswith(first), islice(children, at, at + MOST_BRANCHES)
    )
    return max(alike, key=lambda child: child.last_used, default=None)


class PrefixIndex:
    """Indexes nothing, so requests share nothing: what `--no-prefix-cache` uses.

    RadixTree overrides all that can be otherwise.
    """

    def __init__(self) -> None:
        self.observers = Observers()

    @property
    def n_nodes(self) -> int:
        """How many nodes there are."""
        return 0

    @property
    def namespaces(self) -> Sequence[Namespace]:
        """Those that have something indexed."""
        return ()

    def match(self, namespace: Namespace, packed: bytes) -> Match:
        """The longest prefix of `packed` that is indexed. Changes nothing, not even recency."""
        return Match(0, (), ())

    def continuation(self, namespace: Namespace, packed: bytes, most: int) -> tuple[int, ...]:
        """The indexed tokens that follow all of `packed`, at most `most`. Changes nothing."""
        return ()

    def has_whole(self, block: BlockId) -> bool:
        """Whether the block is indexed, and not as a tail."""
        return False

    def find_behind(self, block: BlockId, packed: bytes) -> BlockId | None:
        """The indexed block that holds `packed`, up to a block of tokens behind a whole `block`."""
        return None

    def touch(self, match: Match) -> None:
        """Make what was matched the most recently used."""

    def insert(
        self, namespace: Namespace, packed: bytes, blocks: Sequence[BlockId]
    ) -> tuple[BlockId, ...]:
        """Index one or more `blocks` under the tokens that they hold; the last may be a tail.

        Where an equal whole block is indexed already, that one stays. Returns those equal blocks:
        a run from the first block on, to be used in place of the caller's own.
        """
        return ()

    def insert_behind(
        self, block: BlockId, packed: bytes, blocks: Sequence[BlockId]
    ) -> tuple[BlockId, ...]:
        """The same below an indexed whole `block`; `packed` and `blocks` are what follows it."""
        return ()

    def evict(self) -> BlockId | None:
        """Free the least recently used block that can be; None where none can be."""
        return None

    def offer(self, blocks: Sequence[BlockId]) -> None:
        """No table holds these indexed blocks any more: they can be evicted."""

    def clear(self, namespace: Namespace | None = None) -> int:
        """Forget the index of one namespace, or all. Returns how many blocks became free."""
        return 0

    def walk(self) -> Iterator[tuple[Namespace, bytes, Node]]:
        """Every node with the packed tokens from the root to its lower end, parents first."""
        yield from ()

    def nodes(self) -> Iterator[Node]:
        """Every node as it is when it comes up, parents first, while the index may change."""
        yield from ()

    def node_of(self, block: BlockId) -> Node | None:
        """The node that has the block, if it is indexed."""
        return None

    def next_evicted(self, n: int) -> Sequence[Node]:
        """Up to `n` nodes in the order of their eviction."""
        return ()

    def in_flight(self, probe: Probe, checkpoint: Checkpoint) -> InFlight:
        """The prefixes in flight of a store whose leases are indexed here."""
        return InFlight()

    def problems(self) -> Iterator[Finding]:
        """What does not add up besides the nodes."""
        yield from ()


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
