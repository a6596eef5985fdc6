"""Maps blocks, windows and states in memory to the parts of entries on disk.

A block of which more is saved later, such as a recurrent state, is written again, as another
*version*: an entry whose hash is made from that of the version before.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from kvstore.disk.types import Buffer, EntryHead
from kvstore.node import Node
from kvstore.ops import ReadBlock
from kvstore.pool import blocks_for
from kvstore.slots import Group
from kvstore.tokens import TOKEN_BYTES, Digest, child_digest, later_digest
from kvstore.types import BlockId


@dataclass(frozen=True, slots=True)
class Candidate:
    """An entry that could be written as a child of `parent`, and the read of what memory has of it.

    `index`: of its block in its node.
    """

    index: int
    parent: Digest
    head: EntryHead
    read: ReadBlock


class Entries:
    """Translates between a store's groups and an entry's parts.

    `part_bytes`: of a block, of each window's block, of a state; the groups are in that order.
    """

    def __init__(self, groups: Sequence[Group], part_bytes: Sequence[int], block_size: int) -> None:
        self._groups = groups
        self._part_bytes = tuple(part_bytes)
        self._n_windows = len(part_bytes) - 2
        self.block_size = block_size

    @property
    def has_groups(self) -> bool:
        return bool(self._groups)

    def candidates(self, node: Node, first: int) -> Iterator[Candidate]:
        """The entries of a node's blocks from `first` on, in order."""
        for index in range(first, len(node.blocks)):
            block, parent = node.blocks[index], node.parent_hash(index)
            start = index * self.block_size
            n_tokens = min(node.n_tokens - start, self.block_size)
            for end in self._ends(block, n_tokens):
                packed = node.packed[start * TOKEN_BYTES : (start + end) * TOKEN_BYTES]
                block_hash = child_digest(parent, bytes(packed))
                yield self._candidate(index, parent, block_hash, block, end)
            if n_tokens == self.block_size:
                yield self._candidate(index, parent, node.hashes[index], block, n_tokens)

    def _candidate(
        self, index: int, parent: Digest, block_hash: Digest, block: BlockId, n_tokens: int
    ) -> Candidate:
        """The entry of the first `n_tokens` tokens of an indexed block."""
        slots = [group.attached(block, n_tokens) for group in self._groups]
        slots += [None] * (self._n_windows + 1 - len(slots))
        sizes = tuple(
            None if slot is None else size
            for slot, size in zip((block, *slots), self._part_bytes, strict=True)
        )
        read = ReadBlock(block, n_tokens, tuple(slots[: self._n_windows]), slots[-1])
        return Candidate(index, parent, EntryHead(block_hash, n_tokens, sizes), read)

    def _ends(self, block: BlockId, n_tokens: int) -> Collection[int]:
        """The lengths, shorter than a block, at which the block needs an entry of its own: a
        sequence could resume there, and no other entry has what that takes.
        """
        offsets = [group.resume_offsets(block) for group in self._groups]
        found = next((each for each in offsets if each is not None), (n_tokens,))
        return [n for n in sorted(found) if n <= n_tokens and n < self.block_size]

    def fits(self, parts: Sequence[Buffer | None]) -> bool:
        """Whether the parts have the sizes of this storage, and a block is among them."""
        return (
            len(parts) == len(self._part_bytes)
            and parts[0] is not None
            and all(
                part is None or len(part) == size
                for part, size in zip(parts, self._part_bytes, strict=True)
            )
        )

    def needed(self, n_tokens: int) -> range:
        """The last entries of a table that are needed to resume after `n_tokens` tokens."""
        end = blocks_for(n_tokens, self.block_size)
        return range(
            min((group.required_blocks(n_tokens).start for group in self._groups), default=end), end
        )

    def needed_parts(self, index: int, n_tokens: int) -> list[int]:
        """The numbers of the parts of an entry of a table that it takes to resume."""
        groups = enumerate(self._groups, start=1)
        return [part for part, group in groups if index in group.required_blocks(n_tokens)]


def versions(
    block_hash: Digest, entry: Callable[[Digest], EntryHead | None]
) -> Iterator[EntryHead]:
    """All versions of a block that `entry` finds, the first one first."""
    while (head := entry(block_hash)) is not None:
        yield head
        block_hash = later_digest(block_hash)


def has_parts(head: EntryHead, parts: Collection[int]) -> bool:
    """Whether an entry has these parts. A damaged index on disk may list fewer parts."""
    return all(part < len(head.sizes) and head.sizes[part] is not None for part in parts)
