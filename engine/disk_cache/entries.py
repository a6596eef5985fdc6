"""How blocks, windows and states in memory correspond to the parts of an entry on disk."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from kvstore.ops import ReadBlock
from kvstore.pool import blocks_for
from kvstore.slots import Group
from kvstore.tokens import Digest
from kvstore.types import BlockId


@dataclass(frozen=True, slots=True)
class Candidate:
    """An entry that could be written now, as the child of `parent`."""

    parent: Digest
    block_hash: Digest
    read: ReadBlock
    n_bytes: int
    is_whole: bool
    has: tuple[bool, ...]  # which parts are in memory


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

    def candidate(
        self, parent: Digest, block_hash: Digest, block: BlockId, n_tokens: int
    ) -> Candidate:
        """For the first `n_tokens` tokens of an indexed block."""
        slots = [group.attached(block, n_tokens) for group in self._groups]
        slots += [None] * (self._n_windows + 1 - len(slots))
        has = (True, *(slot is not None for slot in slots))
        n_bytes = sum(size for size, here in zip(self._part_bytes, has, strict=True) if here)
        read = ReadBlock(block, n_tokens, tuple(slots[: self._n_windows]), slots[-1])
        is_whole = n_tokens == self.block_size
        return Candidate(parent, block_hash, read, n_bytes, is_whole, has)

    def ends(self, block: BlockId, n_tokens: int) -> Collection[int]:
        """The lengths, shorter than a block, at which the block needs an entry of its own: a
        sequence could resume there, and no other entry has what that takes.
        """
        offsets = [group.resume_offsets(block) for group in self._groups]
        found = next((each for each in offsets if each is not None), (n_tokens,))
        return [n for n in sorted(found) if n <= n_tokens and n < self.block_size]

    def fits(self, parts: Sequence[bytes | None]) -> bool:
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
        """The last entries of a table, as many as it takes to resume after so many tokens."""
        end = blocks_for(n_tokens, self.block_size)
        return range(
            min((group.required_blocks(n_tokens).start for group in self._groups), default=end), end
        )

    def can_resume(self, parts: Mapping[int, Sequence[int | None]], n_tokens: int) -> bool:
        """Whether entries with such parts, by index, have all that it takes to resume. A damaged
        index on disk may list fewer parts.
        """
        return all(
            number < len(parts[index]) and parts[index][number] is not None
            for number, group in enumerate(self._groups, start=1)
            for index in group.required_blocks(n_tokens)
        )
