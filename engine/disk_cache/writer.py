"""What of the tree is written to disk, and when.

A node is *dirty* from when something of it is new until all of it has been offered to the tier. It
is *due* when nothing has been added to it for a while, when a sequence adopts it, when it is about
to be evicted, or when the engine ends. Then steps read it, a few blocks each, parents first.

No block is pinned for that: a step's reads come after all its writes, and before the writes of any
step that is submitted later.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from engine.disk_cache.byte_pace import BytePace
from engine.disk_cache.dirty_set import DirtySet, whole_blocks
from engine.disk_cache.entries import Candidate, Entries
from engine.disk_cache.tier import Tier
from engine.values.settings import DiskWrites
from kvstore.disk.types import Entry, Extent
from kvstore.ops import Parts, ReadBlock
from kvstore.tokens import TOKEN_BYTES, Digest, root_digest
from kvstore.tree import Node, RadixTree
from kvstore.types import BlockId, Namespace

RETRY_SECONDS = 0.25
"""How long to wait before asking a tier again that had no room."""


@dataclass(frozen=True, slots=True)
class WriteRules:
    """What is written. `least_tokens`: the shortest path from the root that is, in tokens."""

    writes: DiskWrites = DiskWrites.SELECTIVE
    salted: bool = False
    least_tokens: int = 256
    idle_seconds: float = 1.0


@dataclass(slots=True)
class _Read:
    """What a step reads of one node."""

    node: Node
    candidates: tuple[Candidate, ...]
    is_wanted: bool = True

    @property
    def n_bytes(self) -> int:
        return sum(candidate.n_bytes for candidate in self.candidates)


class DiskWriter:
    """Implements `TreeObserver` for a tree that hashes its blocks."""

    def __init__(
        self,
        tier: Tier,
        tree: RadixTree,
        entries: Entries,
        rules: WriteRules,
        clock: Callable[[], float],
    ) -> None:
        self._tier = tier
        self._tree = tree
        self._rules = rules
        self._clock = clock
        self._later: dict[Node, float] = {}  # when each is due, the first due first
        self._due: dict[Node, None] = {}
        self._reads: dict[int, list[_Read]] = {}  # by the step's number
        self._pace = BytePace()
        self._block_size = entries.block_size
        self._dirty_set = DirtySet(tier, entries)
        self._retry_at = -math.inf
        self._is_ending = False
        self._bytes_left = math.inf  # that may still be read, once the engine ends

    @property
    def is_due(self) -> bool:
        """Whether a step could read something now, or is reading."""
        return bool(self._reads) or self._due_at() <= self._clock()

    @property
    def is_dirty(self) -> bool:
        return bool(self._reads or self._due or self._later)

    @property
    def namespaces(self) -> frozenset[Namespace]:
        """Those that steps are reading. The tree may have evicted them since."""
        reads = (read for reads in self._reads.values() for read in reads)
        return frozenset(read.node.namespace for read in reads if read.is_wanted)

    def wait_seconds(self) -> float | None:
        """How long until something is due, if nothing else happens; None: never."""
        due_at = self._due_at()
        return None if due_at == math.inf else max(due_at - self._clock(), 0.0)

    def end(self) -> None:
        """Nothing will be added any more. All that is dirty is due, the most recently used first,
        up to what the tier holds without evicting the first of it.
        """
        self._is_ending = True
        nodes = sorted({**self._due, **self._later}, key=lambda node: -node.last_used)
        if nodes:
            self._bytes_left = self._tier.path_room(root_digest(nodes[0].namespace))
        self._later.clear()
        self._due = dict.fromkeys(nodes)
        self._retry_at = -math.inf

    def clear(self, namespace: Namespace | None) -> None:
        """Write nothing of the namespace, or of any, before something is added to it."""
        for read in [read for reads in self._reads.values() for read in reads]:
            if read.is_wanted and namespace in (None, read.node.namespace):
                self._drop(read)
        for node in [*self._due, *self._later]:
            if namespace in (None, node.namespace):
                self._forget(node)

    # What the tree reports.

    def stored(self, node: Node, first: int) -> None:
        self._dirty_set.stored(node, first)
        self._mark_dirty(node)

    def attached(self, block: BlockId) -> None:
        """A group has stored something with the block: a state where a sequence stopped, say."""
        node = self._tree.node_of(block)
        if node is not None and self._takes(node):
            self._dirty_set.attached(node, block)
            self._mark_dirty(node)

    def split(self, node: Node, lower: Node) -> None:
        self._dirty_set.split(node, lower)
        if node in self._due:
            self._due[lower] = None
        elif node in self._later:
            self._mark_dirty(lower)

    def used(self, node: Node) -> None:
        for above in node.path():
            if self._later.get(above, math.inf) < math.inf:
                del self._later[above]
                self._due[above] = None
        whole = whole_blocks(node, self._block_size)
        if whole or (node.parent is not None and node.parent.blocks):
            self._tier.touch([node.parent_hash(whole)])
        for tail_hash in node.hashes[whole:]:
            self._tier.touch([tail_hash])

    def removed(self, node: Node) -> None:
        self._forget(node)
        self._dirty_set.forget(node)

    def cleared(self, namespace: Namespace) -> None:
        self._dirty_set.forget_those_that_left()
        self.clear(namespace)

    # What steps read.

    def plan(self, number: int, seconds: float) -> list[ReadBlock]:
        """What the step of that number reads after its writes, in so much time: at least one entry
        where any is due.
        """
        now = self._clock()
        if now < self._retry_at:
            return []
        self._ripen(now)
        is_tier_idle = self._tier.is_idle
        found = self._find(self._pace.bytes_in(seconds, self._tier.read_rate))
        if found:
            self._reads[number] = found
            self._bytes_left -= sum(read.n_bytes for read in found)
        elif self._is_ending and not self._reads and (is_tier_idle or self._bytes_left <= 0):
            self._due.clear()  # nothing makes room any more
        elif self._due:
            self._retry_at = now + RETRY_SECONDS
        return [candidate.read for each in found for candidate in each.candidates]

    def read_bytes(self, number: int) -> int:
        """How many bytes the step reads."""
        return sum(read.n_bytes for read in self._reads.get(number, ()))

    def took(self, n_bytes: int, seconds: float) -> None:
        """A step was held up for so long by so many bytes that it read."""
        self._pace.observe(n_bytes, seconds)

    def commit(self, number: int, contents: Sequence[Parts]) -> None:
        """The step has read this."""
        at = 0
        for read in self._reads.pop(number, ()):
            parts = contents[at : at + len(read.candidates)]
            at += len(read.candidates)
            if read.is_wanted:
                blocks = self._drop(read)
                if not self._offer(read, parts):
                    self._postpone(blocks)

    def fail(self, number: int) -> None:
        """The step has read nothing."""
        for read in self._reads.pop(number, ()):
            if read.is_wanted:
                self._postpone(self._drop(read))

    def save_evictable(self, n_nodes: int) -> None:
        """Make the next nodes to be evicted due."""
        if self._rules.writes is DiskWrites.EXIT or not self._later:
            return
        for node in self._tree.next_evicted(n_nodes):
            if node in self._later:
                del self._later[node]
                self._due[node] = None

    def _mark_dirty(self, node: Node) -> None:
        if not self._takes(node):
            return
        self._forget(node)
        match self._rules.writes:
            case _ if self._is_ending:
                self._due[node] = None
            case DiskWrites.ALL:
                self._due[node] = None
            case DiskWrites.EXIT:
                self._later[node] = math.inf
            case DiskWrites.SELECTIVE:
                self._later[node] = self._clock() + self._rules.idle_seconds

    def _takes(self, node: Node) -> bool:
        return self._rules.salted or not node.namespace.cache_salt

    def _forget(self, node: Node) -> None:
        self._due.pop(node, None)
        self._later.pop(node, None)

    def _postpone(self, blocks: Iterable[BlockId]) -> None:
        """Try again later, whichever nodes the blocks are in by then."""
        found = map(self._tree.node_of, sorted(blocks))
        for node in dict.fromkeys(node for node in found if node is not None):
            self._dirty_set.forget(node)
            if node not in self._later and self._takes(node):
                self._due[node] = None
                self._retry_at = self._clock() + RETRY_SECONDS

    def _due_at(self) -> float:
        """When the first dirty node can be read; infinity: never."""
        first = -math.inf if self._due else next(iter(self._later.values()), math.inf)
        return max(first, self._retry_at)

    def _ripen(self, now: float) -> None:
        """Move nodes whose time has come from later to due."""
        while self._later:
            node, due = next(iter(self._later.items()))
            if due > now:
                break
            del self._later[node]
            self._due[node] = None

    def _find(self, step_bytes: float) -> list[_Read]:
        """Reads of what is due, up to what a step may read and the tier would take."""
        found = list[_Read]()
        room = min(self._tier.room - self._bytes_on_their_way(), self._bytes_left)
        if room <= 0:
            return found
        budget = min(step_bytes, room)
        for node in list(self._due):
            if budget <= 0 and found:
                break
            budget = self._plan_node(node, budget, found)
            if budget < 0:
                break
        return found

    def _plan_node(self, node: Node, budget: float, found: list[_Read]) -> float:
        """Read what is dirty of the path to the node's end. Returns what is left of the budget,
        negative where it was too small. Where the path has become longer than the tier keeps, its
        end is not dirty any more.
        """
        dirty = self._dirty_set
        path = dirty.path(node) if self._is_worth(node) else []
        for each in path:
            taken = list[Candidate]()
            for index, candidate in dirty.candidates(each):
                if dirty.path_room(candidate) < 0:
                    dirty.dismiss(node, candidate)
                    self._take(each, taken, found)
                    self._forget(node)
                    return budget
                if candidate.n_bytes > budget:
                    dirty.saw(each, index)
                    self._take(each, taken, found)
                    return self._squeeze(each, candidate, found)
                budget -= candidate.n_bytes
                taken.append(candidate)
                dirty.read(candidate)
            self._take(each, taken, found)
            dirty.saw_all(each)
        self._forget(node)
        return budget

    def _squeeze(self, node: Node, candidate: Candidate, found: list[_Read]) -> int:
        """Read an entry alone that is larger than what a step may read, if the tier takes it."""
        if not found and candidate.n_bytes <= self._tier.room - self._bytes_on_their_way():
            self._dirty_set.read(candidate)
            self._take(node, [candidate], found)
        return -1

    def _take(self, node: Node, taken: list[Candidate], found: list[_Read]) -> None:
        if taken:
            found.append(_Read(node, tuple(taken)))

    def _is_worth(self, node: Node) -> bool:
        n_tokens = 0
        for above in node.path():
            n_tokens += len(above.packed) // TOKEN_BYTES
            if n_tokens >= self._rules.least_tokens:
                return True
        return self._rules.writes is DiskWrites.ALL

    def _bytes_on_their_way(self) -> int:
        return sum(read.n_bytes for reads in self._reads.values() for read in reads)

    def _drop(self, read: _Read) -> set[BlockId]:
        """The read is not wanted any more; the same entries may be read again meanwhile. Returns
        the blocks that counted on it.
        """
        read.is_wanted = False
        return self._dirty_set.let_go(read.candidates)

    def _offer(self, read: _Read, contents: Sequence[Parts]) -> bool:
        root = root_digest(read.node.namespace)
        extents = _extents(root, read.candidates, contents)
        return all(self._tier.offer(extent) for extent in extents)


def _extents(
    root: Digest, candidates: Sequence[Candidate], contents: Sequence[Parts]
) -> Iterator[Extent]:
    """Runs of whole blocks, each the parent of the next; then the shorter entries, one by one."""
    run, ends = list[Entry](), list[Extent]()
    parent = last = root
    for candidate, parts in zip(candidates, contents, strict=True):
        entry = Entry(candidate.block_hash, candidate.read.n_tokens, parts)
        if not candidate.is_whole:
            ends.append(Extent(root, candidate.parent, (entry,)))
            continue
        if run and candidate.parent != last:
            yield Extent(root, parent, tuple(run))
            run = []
        if not run:
            parent = candidate.parent
        run.append(entry)
        last = candidate.block_hash
    if run:
        yield Extent(root, parent, tuple(run))
    yield from ends
