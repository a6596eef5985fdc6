"""What of the tree is written to disk, and when.

A node is *dirty* from when something of it is new until all of it has been offered to the tier. It
is *due* when nothing has come to it for a while, when somebody adopts it, when it is about to be
evicted, or when the engine ends. Then it is read behind steps, a few blocks each, parents first.

Nothing is pinned for that: what a step reads is read before anything that is submitted later
overwrites it, and it is planned behind all that the step itself writes.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from engine.disk_cache.entries import Candidate, Entries
from engine.disk_cache.names import BlockNames
from engine.disk_cache.tier import Tier
from engine.types import DiskWrites
from kvstore.actions import Parts, ReadBlock
from kvstore.digest import Digest
from kvstore.prefix_index import PrefixIndex
from kvstore.radix_node import Node
from kvstore.tier.types import Entry, Extent
from kvstore.tokens import TOKEN_BYTES
from kvstore.types import Namespace

RETRY_SECONDS = 0.25
"""When the tier has no room, it is asked again after so long."""


@dataclass(frozen=True, slots=True)
class ArchiveRules:
    """How much is written. `least_tokens`: of a path from the root, in tokens."""

    writes: DiskWrites = DiskWrites.SELECTIVE
    salted: bool = False
    least_tokens: int = 256
    idle_seconds: float = 1.0
    step_bytes: int = 4 << 20


@dataclass(frozen=True, slots=True)
class _Read:
    """What a step reads of one node."""

    root: Digest
    node: Node
    candidates: tuple[Candidate, ...]

    @property
    def n_bytes(self) -> int:
        return sum(candidate.n_bytes for candidate in self.candidates)


class Archive:
    """An observer of the tree, told after `names` is."""

    def __init__(
        self,
        tier: Tier,
        index: PrefixIndex,
        names: BlockNames,
        entries: Entries,
        rules: ArchiveRules,
        clock: Callable[[], float],
    ) -> None:
        self._tier = tier
        self._index = index
        self._names = names
        self._entries = entries
        self._rules = rules
        self._clock = clock
        self._later: dict[Node, float] = {}  # in the order of the times at which they are due
        self._due: dict[Node, None] = {}
        self._reads: dict[int, list[_Read]] = {}  # by the step's number
        self._reading: dict[Digest, int] = {}  # and how long a path may be behind it, in bytes
        self._scanned: dict[Node, int] = {}  # blocks of which nothing is new, as far as is known
        self._retry_at = -math.inf
        self._is_ending = False
        self._bytes_left = math.inf  # that may be read until the end

    @property
    def is_due(self) -> bool:
        """Whether a step could read something now, or has."""
        return bool(self._reads) or (bool(self._due_now()) and self._clock() >= self._retry_at)

    @property
    def is_dirty(self) -> bool:
        return bool(self._reads or self._due or self._later)

    def wait_seconds(self) -> float | None:
        """Until something is due, if nothing else happens; None: never."""
        now = self._clock()
        if self._due:
            return max(self._retry_at - now, 0.0)
        first = next(iter(self._later.values()), math.inf)
        return None if first == math.inf else max(first - now, 0.0)

    def end(self) -> None:
        """Nothing will be added any more: all that is dirty is due, the last used first, as much as
        the tier holds without losing the first of it.
        """
        self._is_ending = True
        nodes = sorted({**self._due, **self._later}, key=lambda node: -node.last_used)
        if nodes:
            self._bytes_left = self._tier.path_room(self._names.root(nodes[0].namespace))
        self._later.clear()
        self._due = dict.fromkeys(nodes)
        self._retry_at = -math.inf

    def forget_reads(self) -> None:
        """What is being read is not to be written: something has been cleared."""
        dropped = [read for reads in self._reads.values() for read in reads]
        self._reads = {number: [] for number in self._reads}
        self._reading.clear()
        for read in dropped:
            self._postpone(read.node)

    # What the tree tells.

    def stored(self, node: Node, first: int) -> None:
        self._soil(node)
        if first == 0 and node.parent is not None and node.parent.blocks:
            self._soil(node.parent)  # a state may stand where its children part

    def split(self, node: Node, lower: Node) -> None:
        if node in self._due:
            self._due[lower] = None
        elif node in self._later:
            self._later[lower] = self._later[node]
        self._soil(node)

    def used(self, node: Node) -> None:
        above: Node | None = node
        while above is not None and above.blocks:
            if self._later.get(above, math.inf) < math.inf:
                del self._later[above]
                self._due[above] = None
            above = above.parent
        if whole := self._names.whole_blocks(node):
            self._tier.touch([self._names.of(node.blocks[whole - 1])])

    def removed(self, node: Node, n_blocks: int) -> None:
        if not node.blocks:
            self._forget(node)

    def cleared(self, namespace: Namespace) -> None:
        for node in [*self._due, *self._later]:
            if not node.blocks:
                self._forget(node)
        self.forget_reads()

    # What the steps do.

    def plan(self, number: int) -> list[ReadBlock]:
        """What the step of that number reads, behind all that it writes."""
        now = self._clock()
        if now < self._retry_at:
            return []
        is_tier_idle = self._tier.is_idle
        found = self._find()
        if found:
            self._reads[number] = found
            self._bytes_left -= sum(read.n_bytes for read in found)
        elif self._is_ending and not self._reads and (is_tier_idle or self._bytes_left <= 0):
            self._due.clear()  # nobody makes room any more
        elif self._due:
            self._retry_at = now + RETRY_SECONDS
        return [candidate.read for each in found for candidate in each.candidates]

    def commit(self, number: int, contents: Sequence[Parts]) -> None:
        """The step has read this."""
        at = 0
        for read in self._reads.pop(number, ()):
            parts = contents[at : at + len(read.candidates)]
            at += len(read.candidates)
            self._let_go(read)
            if not self._offer(read, parts):
                self._postpone(read.node)

    def fail(self, number: int) -> None:
        """The step has read nothing."""
        for read in self._reads.pop(number, ()):
            self._let_go(read)
            self._postpone(read.node)

    def save_evictable(self, n_nodes: int) -> None:
        """The next to be evicted are due."""
        if self._rules.writes is DiskWrites.EXIT or not self._later:
            return
        for node in self._index.next_evicted(n_nodes):
            if node in self._later:
                del self._later[node]
                self._due[node] = None

    def _soil(self, node: Node) -> None:
        if node.namespace.cache_salt and not self._rules.salted:
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

    def _forget(self, node: Node) -> None:
        self._due.pop(node, None)
        self._later.pop(node, None)
        self._scanned.pop(node, None)

    def _postpone(self, node: Node) -> None:
        """Try again in a while."""
        if node.blocks and node not in self._later:
            self._forget(node)
            self._due[node] = None
            self._retry_at = self._clock() + RETRY_SECONDS

    def _due_now(self) -> dict[Node, None]:
        now = self._clock()
        while self._later:
            node, due = next(iter(self._later.items()))
            if due > now:
                break
            del self._later[node]
            self._due[node] = None
        return self._due

    def _find(self) -> list[_Read]:
        """What is due, as much as a step may read and the tier would take."""
        found = list[_Read]()
        room = min(self._tier.room - self._bytes_on_their_way(), self._bytes_left)
        if room <= 0:
            return found
        budget = min(self._rules.step_bytes, room)
        for node in list(self._due_now()):
            if budget <= 0 and found:
                break
            budget = self._plan_node(node, budget, found)
            if budget < 0:
                break
        return found

    def _plan_node(self, node: Node, budget: float, found: list[_Read]) -> float:
        """Read what is new of the path to the node's end; returns what is left of the budget, and
        less than nothing where that was too little. Where the path has become longer than the tier
        keeps, its end is not dirty any more.
        """
        path = self._path(node) if self._is_worth(node) else []
        for each in path:
            taken = list[Candidate]()
            for index, candidate in self._new(each):
                path_room = self._path_room(candidate.parent) - candidate.n_bytes
                if path_room < 0:
                    self._take(each, taken, found)
                    self._forget(node)
                    return budget
                if candidate.n_bytes > budget:
                    self._scanned[each] = index
                    self._take(each, taken, found)
                    return self._squeeze(each, candidate, found)
                budget -= candidate.n_bytes
                taken.append(candidate)
                self._reading[candidate.name] = path_room
            self._take(each, taken, found)
        self._forget(node)
        return budget

    def _squeeze(self, node: Node, candidate: Candidate, found: list[_Read]) -> int:
        """One that is larger than what a step may read is read alone, if the tier takes it."""
        room = self._tier.room
        is_alone = not found and not self._reading
        if is_alone and self._rules.step_bytes < candidate.n_bytes <= room:
            self._reading[candidate.name] = self._path_room(candidate.parent) - candidate.n_bytes
            self._take(node, [candidate], found)
        return -1

    def _take(self, node: Node, taken: list[Candidate], found: list[_Read]) -> None:
        if taken:
            found.append(_Read(self._names.root(node.namespace), node, tuple(taken)))

    def _path(self, node: Node) -> list[Node]:
        """From the first node of which something may be new to this one."""
        path = [node]
        while (above := path[-1].parent) is not None and above.blocks:
            if above not in self._due and self._is_held(self._names.of(above.blocks[-1])):
                break
            path.append(above)
        return path[::-1]

    def _is_worth(self, node: Node) -> bool:
        n_tokens = 0
        above: Node | None = node
        while above is not None and above.blocks:
            n_tokens += len(above.packed) // TOKEN_BYTES
            if n_tokens >= self._rules.least_tokens:
                return True
            above = above.parent
        return self._rules.writes is DiskWrites.ALL

    def _new(self, node: Node) -> Iterator[tuple[int, Candidate]]:
        """What of a node the tier has not, in order, with the blocks' indices."""
        block_size, whole = self._entries.block_size, self._names.whole_blocks(node)
        for index in range(self._first_new(node), len(node.blocks)):
            block, parent = node.blocks[index], self._names.above(node, index)
            n_tokens = min(len(node.packed) // TOKEN_BYTES - index * block_size, block_size)
            names = [
                (end, self._names.tail(node, index, end))
                for end in self._entries.ends(block, n_tokens)
            ]
            if index < whole:
                names.append((block_size, self._names.of(block)))
            for end, name in names:
                candidate = self._entries.candidate(parent, name, block, end)
                if self._is_new(candidate):
                    yield index, candidate

    def _first_new(self, node: Node) -> int:
        """The first block of which something may be new."""
        scanned = self._scanned.get(node, 0)
        if self._entries.has_groups:
            return scanned
        whole = node.blocks[scanned : self._names.whole_blocks(node)]
        return scanned + self._tier.held([self._names.of(block) for block in whole])

    def _is_new(self, candidate: Candidate) -> bool:
        if candidate.name in self._reading:
            return False
        info = self._tier.entry(candidate.name)
        return candidate.adds_to(info) if info else not self._is_held(candidate.name)

    def _is_held(self, name: Digest) -> bool:
        return name in self._reading or self._tier.held([name]) == 1

    def _path_room(self, name: Digest) -> int:
        found = self._reading.get(name)
        return self._tier.path_room(name) if found is None else found

    def _bytes_on_their_way(self) -> int:
        return sum(read.n_bytes for reads in self._reads.values() for read in reads)

    def _let_go(self, read: _Read) -> None:
        for candidate in read.candidates:
            self._reading.pop(candidate.name, None)

    def _offer(self, read: _Read, contents: Sequence[Parts]) -> bool:
        return all(self._tier.offer(extent) for extent in _extents(read, contents))


def _extents(read: _Read, contents: Sequence[Parts]) -> Iterator[Extent]:
    """Runs of whole blocks, each the parent of the next, and what ends within a block by itself."""
    run, ends = list[Entry](), list[Extent]()
    parent = last = read.root
    for candidate, parts in zip(read.candidates, contents, strict=True):
        entry = Entry(candidate.name, candidate.read.n_tokens, parts)
        if not candidate.is_whole:
            ends.append(Extent(read.root, candidate.parent, (entry,)))
            continue
        if run and candidate.parent != last:
            yield Extent(read.root, parent, tuple(run))
            run = []
        if not run:
            parent = candidate.parent
        run.append(entry)
        last = candidate.name
    if run:
        yield Extent(read.root, parent, tuple(run))
    yield from ends
