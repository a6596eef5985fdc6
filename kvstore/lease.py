"""A lease: one sequence's block table, its slots in each group, and the references to them."""

from collections.abc import Iterator
from dataclasses import dataclass

from kvstore.ops import TablePatch
from kvstore.pool import BlockTable
from kvstore.slots import NEVER, GroupState
from kvstore.tokens import Tokens
from kvstore.types import Namespace


@dataclass(eq=False, slots=True, kw_only=True)
class Lease:
    """The KV of one sequence. Only the store changes it; its owner reads.

    `tokens` belongs to the sequence and grows as it generates. Positions [0, cached_tokens) were
    adopted from the prefix cache, or from another lease by a fork. Positions [0, written_tokens)
    hold KV, and steps in flight compute those up to `planned_tokens`.

    Two bounds keep the usual step cheap. Positions up to `ready_tokens` can be planned at once:
    they are in blocks that nobody else refers to, and no group saves anything there. `commit` only
    counts until `due_tokens` tokens are written: then a block is whole, or a saved state complete.

    The first `indexed_blocks` blocks are in the prefix cache, unless that has been cleared. Blocks
    beyond the whole blocks of the first `shared_tokens` tokens are never indexed.
    """

    namespace: Namespace
    tokens: Tokens
    table: BlockTable
    cached_tokens: int
    written_tokens: int
    planned_tokens: int
    ready_tokens: int = 0
    due_tokens: int = 0
    indexed_blocks: int
    shared_tokens: int = NEVER
    group_states: tuple[GroupState, ...] = ()  # one for each of the store's groups, in their order
    is_fork: bool = False
    is_pin: bool = False  # it keeps cached blocks from eviction, and computes nothing
    has_snapshot: bool = False  # to which a rejected draft is rolled back
    is_patched: bool = True  # the tables have changed since the last `take_patches`

    @property
    def indexable_tokens(self) -> int:
        """Number of the written tokens that the prefix cache may have."""
        if self.written_tokens <= self.shared_tokens:
            return self.written_tokens
        block_size = self.table.block_size
        return max(self.shared_tokens // block_size, self.indexed_blocks) * block_size

    def max_step_tokens(self, n_tokens: int, sampled_position: int = 0) -> int:
        """Number of the next `n_tokens` tokens that one step may compute, at least one.

        The token at `sampled_position` is computed with the decodes, after all prefills. Images
        whose tokens see each other are not cut: where the next tokens are of one that has more, it
        is all of them, or 0 if the groups have no room for these before the step in flight is
        committed.
        """
        planned_tokens = self.planned_tokens
        for state in self.group_states:
            n_tokens = state.max_step_tokens(planned_tokens, n_tokens, sampled_position)
        wholes = self.tokens
        if not wholes.wholes or wholes.whole_until(planned_tokens + n_tokens) > planned_tokens:
            return wholes.whole_until(planned_tokens + n_tokens) - planned_tokens
        n_tokens = wholes.whole_from(planned_tokens + n_tokens) - planned_tokens
        for state in self.group_states:
            if state.max_step_tokens(planned_tokens, n_tokens, sampled_position) < n_tokens:
                return 0
        return n_tokens

    def checkpoint(self, n_tokens: int) -> None:
        """Save the state for resuming after `n_tokens` tokens, unless a step beyond is planned."""
        if n_tokens > self.planned_tokens:
            for state in self.group_states:
                state.checkpoint(n_tokens)
            self.ready_tokens = min(self.ready_tokens, n_tokens - 1)

    def end_snapshot(self, *, is_accepted: bool) -> None:
        """Keep the tokens of the step, or return to the snapshot taken for its draft; then no
        planned tokens remain.
        """
        for state in self.group_states:
            state.end_snapshot(is_accepted=is_accepted)
        self.has_snapshot = False
        if not is_accepted:
            self.planned_tokens, self.ready_tokens = self.written_tokens, 0
            self.is_patched = True

    def take_patches(self) -> Iterator[TablePatch]:
        """The entries of the tables that have changed since the last call; at first all."""
        self.is_patched = False
        first, ids = self.table.take_changes()
        if ids:
            yield TablePatch(None, first, ids)
        for group, state in enumerate(self.group_states):
            first, slots = state.take_changes()
            if slots:
                yield TablePatch(group, first, slots)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A refusal without effect: more blocks were needed than were available."""

    needed_blocks: int
    available_blocks: int
