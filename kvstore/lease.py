"""A lease: one sequence's block table and its references, released exactly once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvstore.ops import CopyBlock, StepOps, StorageOp, TablePatch
from kvstore.pool import BlockTable
from kvstore.slots import NEVER, GroupState
from kvstore.tokens import Tokens
from kvstore.types import Namespace


@dataclass(eq=False, slots=True, kw_only=True)
class Lease:
    """The KV of one sequence. Only the store changes it; its owner reads.

    `tokens` belongs to the sequence and grows as it generates. Positions [0, cached_tokens) were
    adopted; [0, written_tokens) hold KV that was adopted or that a step has computed;
    positions from there to `planned_tokens` are computed by steps that have been planned, and those
    from there to `ready_tokens` can be planned at once: they are in blocks that nobody else refers
    to, and no group has ops for them. There is nothing to publish before `due_tokens` have been
    written. The first `indexed_blocks` blocks are in the index, unless that has been cleared.
    `group_states` has one state for each of the store's groups, in their order. What a fork has
    adopted is another lease's, not the index's. What lies behind the whole blocks of the first
    `shared_tokens` tokens is never indexed: it goes with the lease.
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
    shared_tokens: int = NEVER
    group_states: tuple[GroupState, ...] = ()
    is_fork: bool = False
    is_tentative: bool = False  # what is planned stays as a whole, or not at all
    is_patched: bool = True  # since `take_patches` was last asked

    @classmethod
    def adopting(
        cls,
        namespace: Namespace,
        tokens: Tokens,
        table: BlockTable,
        n_tokens: int,
        shared_tokens: int = NEVER,
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
            shared_tokens=shared_tokens,
        )

    @property
    def indexable_tokens(self) -> int:
        """How many of the tokens that it has written the index may have."""
        if self.written_tokens <= self.shared_tokens:
            return self.written_tokens
        whole = self.shared_tokens - self.shared_tokens % self.table.block_size
        return max(whole, self.indexed_blocks * self.table.block_size)

    def max_step_tokens(self, n_tokens: int, last_position: int) -> int:
        """How many of the next `n_tokens` tokens one step may compute, at least one.

        The token at `last_position` is computed with the decodes, behind all chunks.
        """
        for state in self.group_states:
            n_tokens = state.max_step_tokens(self.planned_tokens, n_tokens, last_position)
        return n_tokens

    def checkpoint(self, n_tokens: int) -> None:
        """Save what it takes to resume behind `n_tokens` tokens, if no step is planned beyond."""
        if n_tokens > self.planned_tokens:
            for state in self.group_states:
                state.checkpoint(n_tokens)
            self.ready_tokens = min(self.ready_tokens, n_tokens - 1)

    def keep_back(self, n_tokens: int) -> Sequence[StorageOp] | None:
        """Be ready to go back to before the next step, in which so many tokens more may turn out to
        be others. Returns the ops for that; None where a group cannot.
        """
        kept = list[StorageOp]()
        for state in self.group_states:
            ops = state.keep_back(self.planned_tokens, n_tokens)
            if ops is None:
                return None  # there is one group of states, so none has kept anything
            kept += ops
        self.is_tentative = bool(kept)
        return kept

    def go_back(self) -> None:
        """Go back to what it has written: what was planned behind that are other tokens."""
        self.planned_tokens = self.written_tokens
        if self.is_tentative:
            for state in self.group_states:
                state.go_back()
            self.is_tentative, self.is_patched = False, True
            self.ready_tokens = 0

    def go_on(self) -> None:
        """What was planned are the right tokens."""
        for state in self.group_states:
            state.go_on()
        self.is_tentative = False

    def plan(
        self,
        end_tokens: int,
        last_position: int,
        copies: Sequence[CopyBlock],
        ops: Sequence[StorageOp],
    ) -> StepOps:
        """A step will compute the tokens up to `end_tokens`. Returns the ops around it.

        If it reaches `last_position` it computes the tokens from there on with the decodes,
        behind all chunks. The groups' ops come behind the `copies` of the lease's blocks and `ops`.
        """
        by_target = {copy.target: copy for copy in copies}
        before, after_chunks, after = [*copies, *ops], list[StorageOp](), list[StorageOp]()
        for state in self.group_states:
            n_tokens = end_tokens - self.planned_tokens
            before += state.extend(self.table, self.planned_tokens, n_tokens, by_target)
            if self.planned_tokens < last_position < end_tokens:
                after_chunks += state.save(last_position)
            after += state.save(end_tokens)
            self.ready_tokens = min(self.ready_tokens, state.ready_tokens(end_tokens))
        self.note_due(self.due_tokens)
        self.planned_tokens = end_tokens
        self.is_patched = True
        return StepOps(tuple(before), tuple(after_chunks), tuple(after))

    def advance(self, n_tokens: int) -> bool:
        """It has written so many tokens: to a block's end, or what is due.

        Returns whether a group has saved something there.
        """
        saved = [state.advance(self.table, n_tokens) for state in self.group_states]
        self.note_due((n_tokens // self.table.block_size + 1) * self.table.block_size)
        return any(saved)

    def note_due(self, n_tokens: int) -> None:
        """There is nothing to publish before so many tokens are written or a group has saved."""
        self.due_tokens = min(n_tokens, *(state.due_tokens() for state in self.group_states), NEVER)

    def take_patches(self) -> Iterator[TablePatch]:
        """What has changed in its tables since the last call; at first all of them."""
        self.is_patched = False
        for first, blocks in self.table.take_changes():
            yield TablePatch(None, first, blocks)
        for group, state in enumerate(self.group_states):
            for first, slots in state.take_changes():
                yield TablePatch(group, first, slots)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Nothing was handed out: more blocks were needed than were available."""

    needed_blocks: int
    available_blocks: int
