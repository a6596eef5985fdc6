"""Which leaf of a radix tree is evicted next: a heap, brought up to date as leaves come up."""

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from kvstore.index.radix_node import Node
from kvstore.types import Finding

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
