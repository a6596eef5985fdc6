"""What of the tree the tier has not."""

from collections.abc import Iterable, Iterator

from engine.disk_cache.entries import Candidate, Entries
from engine.disk_cache.names import BlockNames
from engine.disk_cache.tier import Tier
from kvstore.digest import Digest
from kvstore.radix_node import Node
from kvstore.tokens import TOKEN_BYTES

LOOKED_UP_AT_ONCE = 64


class Unwritten:
    """Looks at each block once, unless something about it is new. What is being read for the tier
    counts as if that had it.
    """

    def __init__(self, tier: Tier, names: BlockNames, entries: Entries) -> None:
        self._tier = tier
        self._names = names
        self._entries = entries
        self._seen: dict[Node, int] = {}  # so many of its first blocks were written or are being
        self._reading: dict[Digest, int] = {}  # and how long a path may be behind it, in bytes

    @property
    def is_reading(self) -> bool:
        return bool(self._reading)

    def stored(self, node: Node, first: int) -> None:
        """`node.blocks[first:]` are new, and the one before may carry more than it did."""
        self.saw(node, min(self._seen.get(node, 0), first - 1))

    def split(self, node: Node, lower: Node) -> None:
        if (seen := self._seen.get(node, 0)) > len(node.blocks):
            self.saw(lower, seen - len(node.blocks))
        self.stored(node, len(node.blocks))

    def saw(self, node: Node, n_blocks: int) -> None:
        """Nothing of the node's first blocks is new any more."""
        if n_blocks > 0:
            self._seen[node] = n_blocks
        else:
            self._seen.pop(node, None)

    def saw_all(self, node: Node) -> None:
        """A tail is looked at each time: no name that is known leads to it."""
        self.saw(node, self._names.whole_blocks(node))

    def forget(self, node: Node) -> None:
        """It is to be looked at anew, or has left the tree."""
        self._seen.pop(node, None)

    def forget_those_that_left(self) -> None:
        self._seen = {node: seen for node, seen in self._seen.items() if node.blocks}

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
        for index in range(self._first(node), len(node.blocks)):
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
        above = self._reading.get(candidate.parent)
        if above is None:
            above = self._tier.path_room(candidate.parent)
        return above - candidate.n_bytes

    def read(self, candidate: Candidate) -> None:
        """It is being read."""
        self._reading[candidate.name] = self.path_room(candidate)

    def let_go(self, candidates: Iterable[Candidate]) -> None:
        """They are not being read any more."""
        for candidate in candidates:
            self._reading.pop(candidate.name, None)

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
        if candidate.name in self._reading:
            return False
        info = self._tier.entry(candidate.name)
        return candidate.adds_to(info) if info else not self._is_held(candidate.name)

    def _is_held(self, name: Digest) -> bool:
        return name in self._reading or self._tier.held([name]) == 1
