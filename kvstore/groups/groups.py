"""All groups of a store together, and their ops for the next step."""

from collections.abc import Iterable, Iterator, Sequence

from kvstore.actions import StorageOp
from kvstore.blocks.table import BlockTable
from kvstore.groups.group import Group, GroupState
from kvstore.types import BlockId


class Groups:
    """A lease resumes only where every group can, and has a state in each, in their order."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self.all = tuple(groups)
        self._ops: list[StorageOp] = []  # for the next step

    def resume_point(self, blocks: Sequence[BlockId], n_tokens: int) -> int:
        """The last position up to `n_tokens` at which a lease of these blocks could resume."""
        return n_tokens - sum(self.unresumable(blocks, n_tokens))

    def unresumable(self, blocks: Sequence[BlockId], n_tokens: int) -> Sequence[int]:
        """By how many tokens each group moves the resume point back from `n_tokens`, beyond the
        groups before it.
        """
        missing, asked = [0] * len(self.all), None
        while n_tokens != asked:
            asked = n_tokens
            for index, group in enumerate(self.all):
                point = group.resume_point(blocks, n_tokens)
                missing[index] += n_tokens - point
                n_tokens = point
        return missing

    def count_unresumable(self, missing: Sequence[int]) -> None:
        """A prompt was admitted that matched so many tokens and cannot resume there."""
        for group, n_tokens in zip(self.all, missing, strict=True):
            group.count_unresumable(n_tokens)

    def has_room(self) -> bool:
        """Whether one more lease will always find the slots that it needs."""
        return all(group.has_room() for group in self.all)

    def admit(self, table: BlockTable, cached_tokens: int, n_tokens: int) -> tuple[GroupState, ...]:
        """The group states of a lease that resumes at `cached_tokens`."""
        admitted = [group.admit(table, cached_tokens, n_tokens) for group in self.all]
        self._ops += [op for _, ops in admitted for op in ops]
        return tuple(state for state, _ in admitted)

    def donate(
        self, states: Iterable[GroupState], block: BlockId, last_tokens: int, ahead_tokens: int
    ) -> None:
        """Attach what a lease has at its end to the indexed `block` there, of which it has written
        `last_tokens`; steps in flight compute `ahead_tokens` more.
        """
        for state in states:
            self._ops += state.donate(block, last_tokens, ahead_tokens)

    def copy(self, source: BlockId, target: BlockId, n_tokens: int) -> None:
        """`target` begins with the same tokens as `source`, of which a lease has written these."""
        for group in self.all:
            group.copy(source, target, n_tokens)

    def repoint(self, old: BlockId, new: BlockId) -> None:
        """A table lists `new` in place of `old`: the same tokens, in a block that is indexed."""
        for group in self.all:
            group.repoint(old, new)

    def revoke(self, ops: Sequence[StorageOp]) -> None:
        """These ops were not, or perhaps not, executed: cache nothing that rests on them."""
        for group in self.all:
            group.revoke(ops)

    def ops(self) -> Iterator[StorageOp]:
        """The ops for the next step that have not been taken."""
        return iter(self._ops)

    def take_ops(self) -> list[StorageOp]:
        """Hand out the ops for the next step, once."""
        ops, self._ops = self._ops, []
        return ops
