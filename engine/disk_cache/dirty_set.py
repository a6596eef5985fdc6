"""Which entries of the tree are dirty: not on disk yet, and not being read for it."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from operator import gt

from engine.disk_cache.entries import Candidate, Entries
from engine.disk_cache.tier import Tier
from kvstore.tokens import TOKEN_BYTES, Digest, child_digest
from kvstore.tree import Node
from kvstore.types import BlockId

LOOKED_UP_AT_ONCE = 64


def whole_blocks(node: Node, block_size: int) -> int:
    """How many blocks of the node are whole: all, or all but the last, which is a tail."""
    return len(node.packed) // (block_size * TOKEN_BYTES)


def prefix_hash(node: Node, index: int, n_tokens: int, block_size: int) -> Digest:
    """The hash of the first `n_tokens` tokens of the node's block at `index`."""
    start = index * block_size * TOKEN_BYTES
    packed = bytes(node.packed[start : start + n_tokens * TOKEN_BYTES])
    return child_digest(node.parent_hash(index), packed)


@dataclass(slots=True)
class _Reading:
    """An entry that steps are reading. `path_room`: bytes that a path may still take below it.
    `blocks` count on it: they are not read themselves, or not again, because it is.
    """

    path_room: int
    reads: list[Candidate] = field(default_factory=list)
    blocks: set[BlockId] = field(default_factory=set)

    @property
    def has(self) -> tuple[bool, ...]:
        """Which parts are being read."""
        return tuple(map(any, zip(*(read.has for read in self.reads), strict=True)))


class DirtySet:
    """Looks at each block once, unless something about it is new. An entry that is being read
    counts as written.
    """

    def __init__(self, tier: Tier, entries: Entries) -> None:
        self._tier = tier
        self._entries = entries
        self._seen: dict[Node, int] = {}  # how many of its first blocks are not dirty
        self._renewed: dict[Node, set[BlockId]] = {}  # of these, the blocks that carry more since
        self._reading: dict[Digest, _Reading] = {}

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
        """Nothing of the node is new. A tail is looked at again each time: its hash is not kept."""
        self.saw(node, whole_blocks(node, self._entries.block_size))
        self._renewed.pop(node, None)

    def forget(self, node: Node) -> None:
        """It is to be looked at anew, or has left the tree."""
        self._seen.pop(node, None)
        self._renewed.pop(node, None)

    def forget_those_that_left(self) -> None:
        for node in [node for node in self._seen if not node.blocks]:
            self.forget(node)

    def path(self, node: Node) -> list[Node]:
        """The nodes to this one, from the first on of which the tier lacks something."""
        path = [node]
        while (above := path[-1].parent) is not None and above.blocks:
            if self._is_held(above.hashes[-1]):
                break
            path.append(above)
        return path[::-1]

    def candidates(self, node: Node) -> Iterator[tuple[int, Candidate]]:
        """The node's dirty entries in order, each with its block's index."""
        block_size, whole = self._entries.block_size, whole_blocks(node, self._entries.block_size)
        for index in self._looked_at(node):
            block, parent = node.blocks[index], node.parent_hash(index)
            n_tokens = min(len(node.packed) // TOKEN_BYTES - index * block_size, block_size)
            hashes = [
                (end, prefix_hash(node, index, end, block_size))
                for end in self._entries.ends(block, n_tokens)
            ]
            if index < whole:
                hashes.append((block_size, node.hashes[index]))
            for end, block_hash in hashes:
                candidate = self._entries.candidate(parent, block_hash, block, end)
                if self._is_new(candidate):
                    yield index, candidate

    def path_room(self, candidate: Candidate) -> int:
        """Bytes that a path may still take below this entry; negative: the path is too long."""
        reading = self._reading.get(candidate.parent)
        above = reading.path_room if reading else self._tier.path_room(candidate.parent)
        return above - candidate.n_bytes

    def dismiss(self, node: Node, candidate: Candidate) -> None:
        """The node's path is too long from this entry on. It is looked at again if the entry's
        parent is being read and cannot be kept.
        """
        if (reading := self._reading.get(candidate.parent)) is not None:
            reading.blocks.add(node.blocks[0])

    def read(self, candidate: Candidate) -> None:
        """A step reads it."""
        if candidate.block_hash not in self._reading:
            self._reading[candidate.block_hash] = _Reading(self.path_room(candidate))
        reading = self._reading[candidate.block_hash]
        reading.reads.append(candidate)
        reading.blocks.add(candidate.read.block)

    def let_go(self, candidates: Iterable[Candidate]) -> set[BlockId]:
        """They are not being read any more. Returns the blocks that counted on them. These are
        others than were read where those left the tree and the same tokens came back.
        """
        blocks = set[BlockId]()
        for candidate in candidates:
            reading = self._reading[candidate.block_hash]
            reading.reads.remove(candidate)
            blocks |= reading.blocks
            if not reading.reads:
                del self._reading[candidate.block_hash]
        return blocks

    def _looked_at(self, node: Node) -> Iterator[int]:
        """The indices of the blocks of which something may be new."""
        first = self._first(node)
        if renewed := self._renewed.get(node):
            yield from (i for i, block in enumerate(node.blocks[:first]) if block in renewed)
        yield from range(first, len(node.blocks))

    def _first(self, node: Node) -> int:
        """The first block of which something may be new."""
        whole = whole_blocks(node, self._entries.block_size)
        first = min(self._seen.get(node, 0), whole)
        if first and not self._is_held(node.hashes[first - 1]):
            first = 0  # the tier has lost some of them since
        while first < whole and not self._entries.has_groups:
            hashes = node.hashes[first : min(first + LOOKED_UP_AT_ONCE, whole)]
            held = self._tier.held(hashes)
            first += held
            if held < len(hashes):
                break
        return first

    def _is_new(self, candidate: Candidate) -> bool:
        has, reading = candidate.has, self._reading.get(candidate.block_hash)
        if reading is not None:
            has = tuple(map(gt, has, reading.has))
            reading.blocks.add(candidate.read.block)
        return any(has) and self._tier.lacks(candidate.block_hash, has)

    def _is_held(self, block_hash: Digest) -> bool:
        return block_hash in self._reading or self._tier.held([block_hash]) == 1
