"""What of the tree the tier has not."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from operator import gt

from engine.disk_cache.entries import Candidate, Entries
from engine.disk_cache.names import BlockNames
from engine.disk_cache.tier import Tier
from kvstore.digest import Digest
from kvstore.index.radix_node import Node
from kvstore.tokens import TOKEN_BYTES
from kvstore.types import BlockId

LOOKED_UP_AT_ONCE = 64


@dataclass(slots=True)
class _Reading:
    """An entry that is being read. `path_room`: how long a path may be behind it, in bytes.
    `blocks`: those that are not read for it, or not again, since it is; or for their path's length.
    """

    path_room: int
    reads: list[Candidate] = field(default_factory=list)
    blocks: set[BlockId] = field(default_factory=set)

    @property
    def has(self) -> tuple[bool, ...]:
        """Which parts."""
        return tuple(map(any, zip(*(read.has for read in self.reads), strict=True)))


class Unwritten:
    """Looks at each block once, unless something about it is new. What is being read for the tier
    counts as if that had it.
    """

    def __init__(self, tier: Tier, names: BlockNames, entries: Entries) -> None:
        self._tier = tier
        self._names = names
        self._entries = entries
        self._seen: dict[Node, int] = {}  # so many of its first blocks were written or are being
        self._renewed: dict[Node, set[BlockId]] = {}  # of these, those with more attached since
        self._reading: dict[Digest, _Reading] = {}

    @property
    def is_reading(self) -> bool:
        return bool(self._reading)

    def stored(self, node: Node, first: int) -> None:
        """`node.blocks[first:]` are new."""
        if self._seen.get(node, 0) > first:
            self._seen[node] = first

    def attached(self, node: Node, block: BlockId) -> None:
        """One more slot is attached to one of the node's blocks."""
        if self._seen.get(node, 0):
            self._renewed.setdefault(node, set()).add(block)

    def split(self, node: Node, lower: Node) -> None:
        if (seen := self._seen.get(node, 0)) > len(node.blocks):
            self._seen[node], self._seen[lower] = len(node.blocks), seen - len(node.blocks)
        if below := self._renewed.get(node, set()).intersection(lower.blocks):
            self._renewed[node] -= below
            self._renewed[lower] = below

    def saw(self, node: Node, n_blocks: int) -> None:
        """Nothing of the node's first blocks is new any more."""
        if n_blocks > self._seen.get(node, 0):
            self._seen[node] = n_blocks

    def saw_all(self, node: Node) -> None:
        """A tail is looked at each time: no name that is known leads to it."""
        self.saw(node, self._names.whole_blocks(node))
        self._renewed.pop(node, None)

    def forget(self, node: Node) -> None:
        """It is to be looked at anew, or has left the tree."""
        self._seen.pop(node, None)
        self._renewed.pop(node, None)

    def forget_those_that_left(self) -> None:
        for node in [node for node in self._seen if not node.blocks]:
            self.forget(node)

    def path(self, node: Node) -> list[Node]:
        """From the first node of which the tier lacks something to this one."""
        path = [node]
        while (above := path[-1].parent) is not None and above.blocks:
            if self._is_held(self._names.of(above.blocks[-1])):
                break
            path.append(above)
        return path[::-1]

    def of(self, node: Node) -> Iterator[tuple[int, Candidate]]:
        """In order, with the blocks' indices."""
        block_size, whole = self._entries.block_size, self._names.whole_blocks(node)
        for index in self._looked_at(node):
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

    def path_room(self, candidate: Candidate) -> int:
        """Bytes that a path may still take behind this one; less than nothing: it is too long."""
        reading = self._reading.get(candidate.parent)
        above = reading.path_room if reading else self._tier.path_room(candidate.parent)
        return above - candidate.n_bytes

    def dismiss(self, node: Node, candidate: Candidate) -> None:
        """The node's path is too long behind this one. It is looked at again if that rests on what
        is being read, and cannot be kept.
        """
        if (reading := self._reading.get(candidate.parent)) is not None:
            reading.blocks.add(node.blocks[0])

    def read(self, candidate: Candidate) -> None:
        """It is being read."""
        if candidate.name not in self._reading:
            self._reading[candidate.name] = _Reading(self.path_room(candidate))
        reading = self._reading[candidate.name]
        reading.reads.append(candidate)
        reading.blocks.add(candidate.read.block)

    def let_go(self, candidates: Iterable[Candidate]) -> set[BlockId]:
        """They are not being read any more. Returns the blocks that counted on it: other than those
        that were read where these left the tree, and the same tokens came back.
        """
        blocks = set[BlockId]()
        for candidate in candidates:
            reading = self._reading[candidate.name]
            reading.reads.remove(candidate)
            blocks |= reading.blocks
            if not reading.reads:
                del self._reading[candidate.name]
        return blocks

    def _looked_at(self, node: Node) -> Iterator[int]:
        """The indices of the blocks of which something may be new."""
        first = self._first(node)
        if renewed := self._renewed.get(node):
            yield from (i for i, block in enumerate(node.blocks[:first]) if block in renewed)
        yield from range(first, len(node.blocks))

    def _first(self, node: Node) -> int:
        """The first block of which something may be new."""
        whole = self._names.whole_blocks(node)
        first = min(self._seen.get(node, 0), whole)
        if first and not self._is_held(self._names.of(node.blocks[first - 1])):
            first = 0  # the tier has lost some of them since
        while first < whole and not self._entries.has_groups:
            blocks = node.blocks[first : min(first + LOOKED_UP_AT_ONCE, whole)]
            held = self._tier.held([self._names.of(block) for block in blocks])
            first += held
            if held < len(blocks):
                break
        return first

    def _is_new(self, candidate: Candidate) -> bool:
        has, reading = candidate.has, self._reading.get(candidate.name)
        if reading is not None:
            has = tuple(map(gt, has, reading.has))
            reading.blocks.add(candidate.read.block)
        return any(has) and self._tier.lacks(candidate.name, has)

    def _is_held(self, name: Digest) -> bool:
        return name in self._reading or self._tier.held([name]) == 1
