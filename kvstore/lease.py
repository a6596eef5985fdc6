"""What the store hands a sequence: its table and its references, released exactly once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvstore.actions import CopyBlock, Order, Room, TablePatch
from kvstore.blocks.table import BlockTable
from kvstore.groups.group import NEVER, Share
from kvstore.tokens import Tokens
from kvstore.types import Namespace


@dataclass(eq=False, slots=True, kw_only=True)
class Lease:
    """The KV of one sequence. Only the store changes it; its owner reads.

    `tokens` belongs to the sequence and grows as it generates. Positions [0, cached_tokens) were
    adopted; [0, written_tokens) hold KV that was adopted or that a step has computed;
    positions from there to `planned_tokens` are computed by steps that have been planned, and those
    from there to `ready_tokens` can be without another word: they are in blocks that nobody else
    refers to, and no group has anything to do. There is nothing to publish before `due_tokens` have
    been written. The first `indexed_blocks` blocks are in the index, unless that has been cleared.
    `shares` are those that it has of the store's groups, in their order. What a fork has adopted is
    another lease's, not the index's.
    """

    namespace: Namespace
    tokens: Tokens
    table: BlockTable
    cached_tokens: int
    written_tokens: int
    planned_tokens: int
    ready_tokens: int
    due_tokens: int
    indexed_blocks: int
    shares: tuple[Share, ...] = ()
    is_fork: bool = False
    is_patched: bool = True  # since `take_patches` was last asked

    @classmethod
    def adopting(
        cls, namespace: Namespace, tokens: Tokens, table: BlockTable, n_tokens: int
    ) -> "Lease":
        """One whose first `n_tokens` tokens' KV is in its table, and indexed in whole blocks."""
        return cls(
            namespace=namespace,
            tokens=tokens,
            table=table,
            cached_tokens=n_tokens,
            written_tokens=n_tokens,
            planned_tokens=n_tokens,
            ready_tokens=0,
            due_tokens=0,
            indexed_blocks=n_tokens // table.block_size,
        )

    def stride(self, n_tokens: int, split: int) -> int:
        """How many of the next `n_tokens` tokens the next step may compute, at least one.

        It would compute those from position `split` on behind the others.
        """
        for share in self.shares:
            n_tokens = share.stride(self.planned_tokens, n_tokens, split)
        return n_tokens

    def checkpoint(self, n_tokens: int) -> None:
        """Somebody will want to resume behind its first `n_tokens` tokens."""
        if n_tokens > self.planned_tokens:
            for share in self.shares:
                share.checkpoint(n_tokens)
            self.ready_tokens = min(self.ready_tokens, n_tokens - 1)

    def plan(
        self, end_tokens: int, split: int, copies: Sequence[CopyBlock], orders: Sequence[Order]
    ) -> Room:
        """A step will compute the tokens up to `end_tokens`: what is done around it.

        It computes those from position `split` on behind the others, if that is among them. What
        the groups do comes behind the `copies` of the lease's blocks and others' `orders`.
        """
        by_target = {copy.target: copy for copy in copies}
        before, between, after = [*copies, *orders], list[Order](), list[Order]()
        for share in self.shares:
            n_tokens = end_tokens - self.planned_tokens
            before += share.extend(self.table, self.planned_tokens, n_tokens, by_target)
            if self.planned_tokens < split < end_tokens:
                between += share.save(split)
            after += share.save(end_tokens)
            self.ready_tokens = min(self.ready_tokens, share.ready_tokens(end_tokens))
        self.note_due(self.due_tokens)
        self.planned_tokens = end_tokens
        self.is_patched = True
        return Room(tuple(before), tuple(between), tuple(after))

    def advance(self, n_tokens: int) -> bool:
        """It has written so many tokens, a block's end or what is due. Whether a group has saved
        something there.
        """
        saved = [share.advance(self.table, n_tokens) for share in self.shares]
        self.note_due((n_tokens // self.table.block_size + 1) * self.table.block_size)
        return any(saved)

    def note_due(self, n_tokens: int) -> None:
        """There is nothing to publish before so many are written, or a group has saved."""
        self.due_tokens = min(n_tokens, *(share.due_tokens() for share in self.shares), NEVER)

    def take_patches(self) -> Iterator[TablePatch]:
        """What has changed in its tables since this was last asked; at first all that is there."""
        self.is_patched = False
        for first, blocks in self.table.take_changes():
            yield TablePatch(None, first, blocks)
        for group, share in enumerate(self.shares):
            for first, slots in share.take_changes():
                yield TablePatch(group, first, slots)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why nothing was handed out: the blocks that were needed and those that could be had."""

    needed_blocks: int
    available_blocks: int
