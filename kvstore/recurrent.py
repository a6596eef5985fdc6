"""Recurrent layers: each lease has one running state, and copies are saved where others resume.

A state stands for all tokens before it, so it serves at exactly its position. A saved state is
attached to a block at `n` of its tokens: it stands for these `n` tokens and all before. States are
saved where a prompt ends, at intervals within a long prompt, and where a prompt left what was
cached.
"""

from collections import deque
from collections.abc import Collection, Iterator, Sequence

from kvstore.ops import (
    CopyState,
    FillState,
    ResetState,
    RollBackState,
    StepOp,
    StorageOp,
    When,
)
from kvstore.pool import BlockTable, blocks_for
from kvstore.slots import NEVER, Group, GroupState, PlannedTokens
from kvstore.types import BlockId, SlotId


class RecurrentState(GroupState):
    """A lease's state: `slot` holds it as it is after the tokens of all steps planned so far."""

    group: "RecurrentGroup"

    def __init__(self, group: "RecurrentGroup", slot: SlotId, checkpoints: set[int]) -> None:
        super().__init__(group)
        self.slot = slot
        self._checkpoints = checkpoints
        self._saving: deque[tuple[int, SlotId]] = deque()  # number of tokens, target of the copy
        self._snapshot: SlotId | None = None
        self._is_new = True  # the slot is another than at the last `take_changes`

    def held_slots(self) -> Iterator[SlotId]:
        yield self.slot
        yield from (slot for _, slot in self._saving)
        if self._snapshot is not None:
            yield self._snapshot

    def take_changes(self) -> tuple[int, tuple[SlotId, ...]]:
        """The table of a state has one entry."""
        is_new, self._is_new = self._is_new, False
        return 0, (self.slot,) if is_new else ()

    def max_step_tokens(self, planned_tokens: int, n_tokens: int, sampled_position: int) -> int:
        """A step ends at a checkpoint, unless a state can be saved there before its decodes."""
        end = planned_tokens + n_tokens
        stops = (c for c in self._checkpoints if planned_tokens < c < end and c != sampled_position)
        return min(stops, default=end) - planned_tokens

    def checkpoint(self, n_tokens: int) -> None:
        self._checkpoints.add(n_tokens)

    def plan(self, table: BlockTable, planned: PlannedTokens, ops: list[StepOp]) -> None:
        if planned.start < planned.sampled_position < planned.end:
            self._save(planned.sampled_position, When.AFTER_PREFILLS, ops)
        self._save(planned.end, When.LAST, ops)

    def ready_tokens(self, planned_tokens: int) -> int:
        return min((c - 1 for c in self._checkpoints if c > planned_tokens), default=NEVER)

    def due_tokens(self) -> int:
        return self._saving[0][0] if self._saving else NEVER

    def can_snapshot(self, start: int, end: int) -> bool:
        """Whether a snapshot is possible: not if the step saves a state, which would include the
        draft tokens.
        """
        if self._saving or any(start < c <= end for c in self._checkpoints):
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
        """The running state becomes a saved one, without what steps in flight add to it."""
        slots = self.group.slots
        if block_tokens not in slots.attached_to(last_block):
            slots.attach(last_block, block_tokens, self.slot)
            if ahead_tokens:
                ops.append((When.FIRST, RollBackState(self.slot)))

    def _save(self, n_tokens: int, when: When, ops: list[StepOp]) -> None:
        """Save the state after `n_tokens` tokens, if there is a checkpoint, and room for a copy."""
        if n_tokens in self._checkpoints:
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
    """The states: `n_running` slots are kept for leases, the others are for saved states.

    A long prompt's state is saved every `interval_tokens` tokens.
    """

    can_truncate = False  # a state cannot be rid of its last tokens

    def __init__(self, n_running: int, n_saved: int, block_size: int, interval_tokens: int) -> None:
        super().__init__("recurrent", n_running + n_saved, block_size)
        self._n_running = n_running
        self._n_saved = n_saved
        self._interval_tokens = interval_tokens

    @property
    def can_save(self) -> bool:
        """Whether there is a slot for one more copy, which a lease holds until it is attached."""
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
        return RecurrentState(self, slot, self._checkpoints(n_tokens, end_tokens))

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

    def _resume(self, blocks: Sequence[BlockId], n_tokens: int, ops: list[StepOp]) -> SlotId:
        """A copy of the state saved at `n_tokens`; the saved one itself if no slot is left."""
        entry, offset = divmod(n_tokens - 1, self.block_size)
        saved = self.slots.attached_to(blocks[entry])[offset + 1]
        self.slots.retain(saved)  # lest it be evicted for its own copy
        slot = self.slots.allocate()
        if slot is None:
            self.slots.detach(saved)
            return saved
        self.slots.release(saved)
        ops.append((When.FIRST, CopyState(saved, slot)))
        return slot

    def _checkpoints(self, n_tokens: int, end_tokens: int) -> set[int]:
        """The prompt's end, with its last token and without, and every interval on the way."""
        if self._n_saved == 0:
            return set()
        first = n_tokens - n_tokens % self._interval_tokens + self._interval_tokens
        on_the_way = range(first, end_tokens - 1, self._interval_tokens)
        return {end_tokens - 1, end_tokens, *on_the_way}
