"""Recurrent layers: each lease has one running state, and copies are saved for others to resume.

A state sums up all tokens before it, so a sequence can resume from it at exactly one position. A
saved state is attached to a block at `n` of its tokens: it sums up these `n` tokens and all before.
States are saved where a prompt ends, at intervals within a long prompt, and where a prompt diverged
from what was cached.

A `RoundedGroup` saves states in less precision than the model computes them in. It saves them at
intervals only, in prompts and in answers, and rounds each running state there as well, whether or
not it is saved. So a text does not depend on how much of it was cached.
"""

from collections import deque
from collections.abc import Collection, Iterator, Sequence

from kvstore.ops import (
    CopyState,
    FillState,
    ResetState,
    RollBackState,
    RoundState,
    StepOp,
    StorageOp,
    When,
)
from kvstore.pool import BlockTable, blocks_for
from kvstore.slots import NEVER, Group, GroupState, PlannedTokens
from kvstore.types import BlockId, SlotId


class RecurrentState(GroupState):
    """A lease's state. `slot` has it as of the last planned token, once that step is computed."""

    group: "RecurrentGroup"

    def __init__(self, group: "RecurrentGroup", slot: SlotId, checkpoints: set[int]) -> None:
        super().__init__(group)
        self.slot = slot
        self._checkpoints = checkpoints
        self._saving: deque[tuple[int, SlotId]] = deque()  # number of tokens, target of the copy
        self._snapshot: SlotId | None = None
        self._is_new = True  # since the last `take_changes` the slot is another

    def held_slots(self) -> Iterator[SlotId]:
        yield self.slot
        yield from (slot for _, slot in self._saving)
        if self._snapshot is not None:
            yield self._snapshot

    def take_changes(self) -> tuple[int, tuple[SlotId, ...]]:
        """The slot, as the only entry of a table, if it is another than at the last call."""
        is_new, self._is_new = self._is_new, False
        return 0, (self.slot,) if is_new else ()

    def max_step_tokens(self, planned_tokens: int, n_tokens: int, sampled_position: int) -> int:
        """A step ends at a checkpoint, unless a state can be saved there before its decodes."""
        stop = self._next_checkpoint(planned_tokens)
        if stop == sampled_position:
            stop = self._next_checkpoint(stop)
        return min(stop - planned_tokens, n_tokens)

    def checkpoint(self, n_tokens: int) -> None:
        self._checkpoints.add(n_tokens)

    def plan(self, table: BlockTable, planned: PlannedTokens, ops: list[StepOp]) -> None:
        if planned.start < planned.sampled_position < planned.end:
            self._save(planned.sampled_position, When.AFTER_PREFILLS, ops)
        self._save(planned.end, When.LAST, ops)

    def ready_tokens(self, planned_tokens: int) -> int:
        return self._next_checkpoint(planned_tokens) - 1

    def due_tokens(self) -> int:
        return self._saving[0][0] if self._saving else NEVER

    def can_snapshot(self, start: int, end: int) -> bool:
        """Whether a snapshot is possible: not if the step saves or rounds the state, which would
        include the draft tokens.
        """
        if self._saving or self._next_checkpoint(start - 1) <= end:
            return False
        return self.group.can_save

    def snapshot(self, ops: list[StepOp]) -> None:
        self._snapshot = self._copy(When.FIRST, ops)

    def end_snapshot(self, *, is_accepted: bool) -> None:
        if self._snapshot is not None:
            if not is_accepted:
                self.slot, self._snapshot, self._is_new = self._snapshot, self.slot, True
            self.group.slots.release(self._snapshot)
            self._snapshot = None

    def advance(self, table: BlockTable, written_tokens: int) -> bool:
        n_saving = len(self._saving)
        while self._saving and self._saving[0][0] <= written_tokens:
            saved_tokens, slot = self._saving.popleft()
            entry, offset = divmod(saved_tokens - 1, table.block_size)
            self.group.slots.attach(table[entry], offset + 1, slot)
            self.group.slots.release(slot)
        return len(self._saving) < n_saving

    def donate(
        self, last_block: BlockId, block_tokens: int, ahead_tokens: int, ops: list[StepOp]
    ) -> None:
        """Save the running state where it is, without what steps in flight add to it."""
        slots = self.group.slots
        if block_tokens not in slots.attached_to(last_block):
            slots.attach(last_block, block_tokens, self.slot)
            if ahead_tokens:
                ops.append((When.FIRST, RollBackState(self.slot)))

    def _next_checkpoint(self, n_tokens: int) -> int:
        """The first number of tokens beyond `n_tokens` after which the state is to be saved."""
        return min((c for c in self._checkpoints if c > n_tokens), default=NEVER)

    def _save(self, n_tokens: int, when: When, ops: list[StepOp]) -> None:
        """Save the state after `n_tokens` tokens if that is a checkpoint and a slot is free."""
        if self._next_checkpoint(n_tokens - 1) == n_tokens:
            self._checkpoints.discard(n_tokens)
            if (target := self._copy(when, ops)) is not None:
                self._saving.append((n_tokens, target))

    def _copy(self, when: When, ops: list[StepOp]) -> SlotId | None:
        """Copy the state to a slot of the lease; None if there is no free slot."""
        target = self.group.slots.allocate() if self.group.can_save else None
        if target is not None:
            ops.append((when, CopyState(self.slot, target)))
        return target


class RecurrentGroup(Group):
    """States of recurrent layers. `n_running` slots are kept for leases, `n_saved` are for saved
    states. In a long prompt a state is saved every `interval_tokens` tokens.
    """

    can_truncate = False  # the last tokens cannot be taken out of a state

    def __init__(self, n_running: int, n_saved: int, block_size: int, interval_tokens: int) -> None:
        super().__init__("recurrent", n_running + n_saved, block_size)
        self._n_running = n_running
        self._n_saved = n_saved
        self.interval_tokens = interval_tokens

    @property
    def can_save(self) -> bool:
        """Whether a lease may take one more slot for a copy, to be saved or as a snapshot."""
        n_copies = self.slots.n_references - self.n_leases
        return n_copies < self._n_saved and self.slots.n_referenced < self.slots.n_slots

    def resume_point(self, blocks: Sequence[BlockId], n_tokens: int) -> int:
        for entry in range(blocks_for(n_tokens, self.block_size) - 1, -1, -1):
            start = entry * self.block_size
            saved = self.slots.attached_to(blocks[entry])
            if best := max((n for n in saved if start + n <= n_tokens), default=0):
                return start + best
        return 0

    def required_blocks(self, n_tokens: int) -> range:
        end = blocks_for(n_tokens, self.block_size)
        return range(end - 1, end)

    def has_room(self) -> bool:
        return self.n_leases < self._n_running

    def admit(
        self, blocks: Sequence[BlockId], n_tokens: int, end_tokens: int, ops: list[StepOp]
    ) -> GroupState:
        slot = self._resume(blocks, n_tokens, ops) if n_tokens else self.slots.allocate()
        assert slot is not None, "leases hold more states than were kept for them"
        if n_tokens == 0:
            ops.append((When.FIRST, ResetState(slot)))
        return self._state(slot, n_tokens, end_tokens)

    def resume_offsets(self, block: BlockId) -> Collection[int] | None:
        return self.slots.attached_to(block)

    def fill(
        self, block: BlockId, n_tokens: int, data: bytes | memoryview, ops: list[StepOp]
    ) -> None:
        slot = self.slots.allocate_for(block, n_tokens)
        if slot is not None:
            ops.append((When.FIRST, FillState(slot, data)))

    def revoke(self, op: StorageOp) -> None:
        if isinstance(op, RollBackState | FillState):
            self.slots.detach(op.slot)
        elif isinstance(op, CopyState):
            self.slots.detach(op.target)

    def _resume(self, blocks: Sequence[BlockId], n_tokens: int, ops: list[StepOp]) -> SlotId:
        """A slot with a copy of the state saved at `n_tokens`. If leases use all slots, it is the
        saved state's own slot, and that state is no longer cached.
        """
        entry, offset = divmod(n_tokens - 1, self.block_size)
        saved = self.slots.attached_to(blocks[entry])[offset + 1]
        self.slots.retain(saved)  # or it could be evicted to make room for its copy
        slot = self.slots.allocate()
        if slot is None:
            self.slots.detach(saved)
            return saved
        self.slots.release(saved)
        ops.append((When.FIRST, CopyState(saved, slot)))
        return slot

    def _state(self, slot: SlotId, n_tokens: int, end_tokens: int) -> RecurrentState:
        """The state of a new lease, to be saved at every interval and at the end of the prompt,
        with its last token and without.
        """
        checkpoints = set[int]()
        if self._n_saved:
            first = next_multiple(n_tokens, self.interval_tokens)
            on_the_way = range(first, end_tokens - 1, self.interval_tokens)
            checkpoints = {end_tokens - 1, end_tokens, *on_the_way}
        return RecurrentState(self, slot, checkpoints)


class RoundedState(RecurrentState):
    """A lease's state that is rounded at every interval, and saved nowhere else."""

    def __init__(self, group: RecurrentGroup, slot: SlotId) -> None:
        super().__init__(group, slot, checkpoints=set())

    def checkpoint(self, n_tokens: int) -> None:
        """Do nothing: all checkpoints are at intervals."""

    def donate(
        self, last_block: BlockId, block_tokens: int, ahead_tokens: int, ops: list[StepOp]
    ) -> None:
        """Do nothing: the running state is not rounded. It was saved at the last interval."""

    def _next_checkpoint(self, n_tokens: int) -> int:
        return next_multiple(n_tokens, self.group.interval_tokens)

    def _save(self, n_tokens: int, when: When, ops: list[StepOp]) -> None:
        if self._next_checkpoint(n_tokens - 1) == n_tokens:
            ops.append((when, RoundState(self.slot)))
        super()._save(n_tokens, when, ops)


class RoundedGroup(RecurrentGroup):
    """States that are saved in less precision than the model computes them in. Each running state
    is rounded, and saved if a slot is free, every `interval_tokens` tokens.
    """

    @property
    def resume_multiple(self) -> int:
        """States are saved at multiples of the interval only."""
        return self.interval_tokens

    def _state(self, slot: SlotId, n_tokens: int, end_tokens: int) -> RecurrentState:
        return RoundedState(self, slot)


def next_multiple(n: int, divisor: int) -> int:
    """The least multiple of `divisor` that is larger than `n`."""
    return n - n % divisor + divisor
