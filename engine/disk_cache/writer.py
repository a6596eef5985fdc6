"""Decides which nodes of the tree are written to disk, and when.

A node is *dirty* while part of it is neither on disk nor being written. It is *due* when nothing
has been added to it for a while, when a sequence adopts it, when it is about to be evicted, or when
the engine ends. Then steps read it, a few blocks each, parents first.

When a step is planned, room is reserved in the store for each entry that it will read, so the store
knows what is on its way. How much of a node needs no look is noted in the node (`Node.n_saved`).

No block is pinned for that: a step's reads come after all its writes, and before the writes of any
step that is submitted later.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import accumulate, count, islice

from engine.disk_cache.entries import Candidate, Entries, has_parts, versions
from engine.disk_cache.transfers import BytePace
from engine.values.settings import DiskWrites
from kvstore.disk.catalog import Reservation
from kvstore.disk.store import DiskStore
from kvstore.node import Change, Node, TreeChange
from kvstore.ops import Parts, ReadBlock
from kvstore.tokens import later_digest, root_digest
from kvstore.tree import RadixTree
from kvstore.types import Namespace

RETRY_SECONDS = 0.25
"""How long to wait before asking a store again that had no room."""

HASTENED_LEVELS = 16
"""How many nodes of an adopted path become due, from its end up. With a node, all of its path is
written."""


@dataclass(frozen=True, slots=True)
class WriteRules:
    """Rules of writing. `least_tokens`: the shortest path from the root that is written."""

    writes: DiskWrites = DiskWrites.SELECTIVE
    salted: bool = False
    least_tokens: int = 256
    idle_seconds: float = 1.0


_Queued = tuple[float, int, Node]
"""A node in the queue: when it is due, a number that orders equal times, and the node."""


@dataclass(slots=True)
class _Read:
    """An entry that a step reads. `reservation`: of the store; None once it has been given back."""

    namespace: Namespace
    candidate: Candidate
    reservation: Reservation | None


class DiskWriter:
    """Decides what steps read of `tree`, which hashes its blocks, and hands it to `disk`."""

    def __init__(
        self,
        disk: DiskStore,
        tree: RadixTree,
        entries: Entries,
        rules: WriteRules,
        clock: Callable[[], float],
    ) -> None:
        self._disk = disk
        self._tree = tree
        self._entries = entries
        self._rules = rules
        self._clock = clock
        self._journal = tree.journal = list[TreeChange]()
        self._queue = list[_Queued]()  # a heap of dirty nodes; see `_schedule`
        self._numbers = count()
        self._reads: dict[int, list[_Read]] = {}  # by the step's number
        self.pace = BytePace()  # of what steps read
        self._retry_at = -math.inf
        self._is_ending = False
        self._bytes_left = math.inf  # that may still be read, once the engine ends

    @property
    def is_due(self) -> bool:
        """Whether a step could read something now, or is reading."""
        return bool(self._reads) or self._due_at() <= self._clock()

    @property
    def is_dirty(self) -> bool:
        """Whether something is to be written, or is being read."""
        return bool(self._reads) or self._first() is not None

    @property
    def namespaces(self) -> frozenset[Namespace]:
        """The namespaces that steps are reading. The tree may have evicted them since."""
        reads = (read for reads in self._reads.values() for read in reads)
        return frozenset(read.namespace for read in reads if read.reservation is not None)

    def wait_seconds(self) -> float | None:
        """The seconds until the next node is due; None: never."""
        due_at = self._due_at()
        return None if due_at == math.inf else max(due_at - self._clock(), 0.0)

    def end(self) -> None:
        """Make all dirty nodes due, the most recently used first, as many as the store holds
        without evicting the first of them. Called when no node will be added.
        """
        self._is_ending = True
        nodes = self._dirty_nodes()
        if nodes:
            latest = max(nodes, key=lambda node: node.last_used)
            self._bytes_left = self._disk.path_room(root_digest(latest.namespace))
        for node in nodes:
            self._schedule(node, -node.last_used)
        self._retry_at = -math.inf

    def drop_reads(self, namespace: Namespace | None) -> None:
        """Write nothing of what steps are reading of the namespace, or of any."""
        for read in (read for reads in self._reads.values() for read in reads):
            if read.reservation is not None and namespace in (None, read.namespace):
                self._disk.cancel(read.reservation)
                read.reservation = None

    def clear(self, namespace: Namespace | None) -> None:
        """Write nothing of the namespace, or of any, before something is added to it."""
        self.drop_reads(namespace)
        for node in self._dirty_nodes():
            if namespace in (None, node.namespace):
                node.save_at = None

    # What steps read.

    def plan(self, number: int, seconds: float) -> list[ReadBlock]:
        """The reads of the step after its writes, within the given time: at least one entry if any
        is due.
        """
        now = self._clock()
        if self._due_at() > now:
            return []
        is_disk_idle = self._disk.is_idle
        reads = self._find(now, self.pace.bytes_in(seconds, self._disk.read_rate))
        if reads:
            self._reads[number] = reads
            self._bytes_left -= sum(read.candidate.head.n_bytes for read in reads)
        elif self._is_ending and not self._reads and (is_disk_idle or self._bytes_left <= 0):
            self.clear(None)  # nothing makes room any more
        elif self._due_at() <= now:
            self._retry_at = now + RETRY_SECONDS
        return [read.candidate.read for read in reads]

    def read_bytes(self, number: int) -> int:
        """The bytes that the step reads."""
        return sum(read.candidate.head.n_bytes for read in self._reads.get(number, ()))

    def commit(self, number: int, contents: Sequence[Parts]) -> None:
        """The step has read this."""
        lost = list[_Read]()
        for read, parts in zip(self._reads.pop(number, ()), contents, strict=True):
            if read.reservation is not None and not self._disk.write(read.reservation, parts):
                lost.append(read)
        self._repeat(lost)

    def fail(self, number: int) -> None:
        """The step has read nothing."""
        lost = list[_Read]()
        for read in self._reads.pop(number, ()):
            if read.reservation is not None:
                self._disk.cancel(read.reservation)
                lost.append(read)
        self._repeat(lost)

    def save_evictable(self, n_nodes: int) -> None:
        """Make the next nodes to be evicted due."""
        if self._rules.writes is not DiskWrites.EXIT and self._first() is not None:
            for node in self._tree.next_evicted(n_nodes):
                self._hasten(node)

    # Which nodes are dirty.

    def _note_changes(self) -> None:
        """Take in what has happened to the tree."""
        for change, node, lower in self._journal:
            match change:
                case Change.GROWN if self._takes(node):
                    self._schedule(node, self._save_at(node))
                case Change.SPLIT if lower is not None and node.save_at is not None:
                    self._schedule(lower, node.save_at)
                case Change.ADOPTED if node.hashes:  # it has not been evicted since
                    for above in islice(node.path(), HASTENED_LEVELS):
                        self._hasten(above)
                    self._disk.touch(node.hashes)
                    for head in versions(later_digest(node.hashes[-1]), self._disk.entry):
                        self._disk.touch((head.block_hash,))
        self._journal.clear()

    def _takes(self, node: Node) -> bool:
        return self._rules.salted or not node.namespace.cache_salt

    def _save_at(self, node: Node) -> float:
        """When a node is due to which something has been added."""
        if self._is_ending:
            return -node.last_used  # the most recently used first
        match self._rules.writes:
            case DiskWrites.ALL:
                return self._clock()
            case DiskWrites.EXIT:
                return math.inf
            case DiskWrites.SELECTIVE:
                return self._clock() + self._rules.idle_seconds

    def _schedule(self, node: Node, save_at: float) -> None:
        """Queue a node. Entries of the queue with another time than their node's are outdated, and
        so are those of nodes that have left the tree. They stay until they are the first, or until
        there are more than two entries for each node of the tree.
        """
        if node.save_at == save_at:
            return
        node.save_at = save_at
        heappush(self._queue, (save_at, next(self._numbers), node))
        if len(self._queue) > 2 * self._tree.n_nodes:
            self._queue = [entry for entry in self._queue if _is_up_to_date(entry)]
            heapify(self._queue)

    def _hasten(self, node: Node) -> None:
        """A node that would be written in a while is due now."""
        now = self._clock()
        if node.save_at is not None and now < node.save_at < math.inf:
            self._schedule(node, now)

    def _first(self) -> Node | None:
        """The dirty node that is due first."""
        self._note_changes()
        while self._queue:
            if _is_up_to_date(self._queue[0]):
                return self._queue[0][2]
            heappop(self._queue)
        return None

    def _due_at(self) -> float:
        """When the first dirty node can be read; infinity: never."""
        node = self._first()
        if node is None or node.save_at is None:
            return math.inf
        return max(node.save_at, self._retry_at)

    def _dirty_nodes(self) -> list[Node]:
        self._note_changes()
        return [entry[2] for entry in self._queue if _is_up_to_date(entry)]

    # What is read of them.

    def _find(self, now: float, step_bytes: float) -> list[_Read]:
        """Reads of due nodes, limited by the step and by the room in the store."""
        reads = list[_Read]()
        if self._disk.room <= 0:
            return reads
        budget = min(step_bytes, self._bytes_left)
        while self._bytes_left > 0 and (budget > 0 or not reads) and self._due_at() <= now:
            node = self._first()
            assert node is not None, "a node is due"
            left = self._read_path(node, budget, reads)
            if left is None:
                break
            budget, node.save_at = left, None
        return reads

    def _read_path(self, node: Node, budget: float, reads: list[_Read]) -> float | None:
        """Read the dirty entries of the path to the node's end. An entry larger than the budget is
        read alone. Returns the rest of the budget; None if time or room did not suffice. Beyond the
        longest path that the store keeps, nothing is dirty.
        """
        for each in self._unsaved(node) if self._is_worth(node) else ():
            root = root_digest(each.namespace)
            for candidate in self._missing(each):
                parent, head = candidate.parent, candidate.head
                each.n_saved = candidate.index
                if self._disk.path_room(parent) < head.n_bytes:
                    return budget
                if reads and head.n_bytes > budget:
                    return None
                reservation = self._disk.reserve(root, parent, head)
                if reservation is None:
                    return None
                reads.append(_Read(each.namespace, candidate, reservation))
                budget -= head.n_bytes
            each.n_saved = each.whole_blocks(self._entries.block_size)
        return budget

    def _missing(self, node: Node) -> Iterator[Candidate]:
        """The entries of a node's blocks of which no version on disk has all parts, in order."""
        for candidate in self._entries.candidates(node, self._n_saved(node)):
            block_hash = candidate.head.block_hash
            parts = [part for part, size in enumerate(candidate.head.sizes) if size is not None]
            for head in versions(block_hash, self._disk.held_entry):
                if has_parts(head, parts):
                    break
                block_hash = later_digest(head.block_hash)
            else:
                yield replace(candidate, head=replace(candidate.head, block_hash=block_hash))

    def _is_worth(self, node: Node) -> bool:
        lengths = accumulate(above.n_tokens for above in node.path())
        is_long = any(n_tokens >= self._rules.least_tokens for n_tokens in lengths)
        return is_long or self._rules.writes is DiskWrites.ALL

    def _unsaved(self, node: Node) -> Iterator[Node]:
        """The path to this node, from the first node that the store does not have completely."""
        path = [node]
        while (above := path[-1].parent) is not None and above.blocks:
            if self._disk.held(above.hashes[-1:]):
                break
            path.append(above)
        return reversed(path)

    def _n_saved(self, node: Node) -> int:
        """How many of the node's first blocks need no look. A tail always needs one."""
        n_saved = node.n_saved
        if n_saved and not self._disk.held(node.hashes[n_saved - 1 : n_saved]):
            n_saved = 0  # the store has lost some of them since
        if not self._entries.has_groups:
            n_saved += self._disk.held(
                node.hashes[n_saved : node.whole_blocks(self._entries.block_size)]
            )
        return n_saved

    def _repeat(self, lost: Sequence[_Read]) -> None:
        """These entries will not be written. What counted on them, and all below, is dirty again.

        That may be other nodes than were read: the tree may have changed since. Looks at all nodes
        of their namespaces, as this is rare.
        """
        if not lost:
            return
        now, again = self._clock(), set[Node]()
        namespaces = {read.namespace for read in lost}
        parents = {read.candidate.parent for read in lost}
        for node in self._tree.nodes():
            if node.namespace in namespaces:
                indices = (i for i in range(len(node.blocks)) if node.parent_hash(i) in parents)
                first = 0 if node.parent in again else next(indices, None)
                if first is not None:
                    again.add(node)
                    node.n_saved = min(node.n_saved, first)
                    if node.save_at is None and self._takes(node):
                        self._schedule(node, now)
        self._retry_at = now + RETRY_SECONDS


def _is_up_to_date(queued: _Queued) -> bool:
    save_at, _, node = queued
    return node.is_indexed and node.save_at == save_at
