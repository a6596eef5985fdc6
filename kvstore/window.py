"""Sliding windows: a lease holds the slots of its last `window` tokens and releases older ones.

A slot holds the window layers' KV of one block. It is attached to that block as a whole, at
`block_size` tokens, and fills as the block does. It stays cached when a lease's window has moved
on, until another lease needs the slot.
"""

from collections.abc import Iterator, Sequence

from kvstore.ops import CopyBlock, FillBlock, StepOp, StorageOp, When
from kvstore.pool import BlockTable, DirtyRange, blocks_for
from kvstore.slots import Group, GroupState, PlannedTokens
from kvstore.types import BlockId, SlotId


def first_needed(n_tokens: int, window: int, block_size: int) -> int:
    """The entry of a table that holds the first token which the token at `n_tokens` sees."""
    return max(n_tokens - window + 1, 0) // block_size


def lease_slots(window: int, block_size: int, step_tokens: int) -> int:
    """The most slots that one lease holds: its window and a step, at any offset in their blocks."""
    return blocks_for(window + step_tokens, block_size) + 2


class WindowState(GroupState):
    """A lease's slots: `slots[i]` belongs to entry `first + i` of its table."""

    group: "WindowGroup"

    def __init__(self, group: "WindowGroup", first: int, slots: list[SlotId]) -> None:
        super().__init__(group)
        self.first = first
        self.slots = slots
        self._dirty = DirtyRange(first, first + len(slots))

    def held_slots(self) -> Iterator[SlotId]:
        return iter(self.slots)

    def take_changes(self) -> tuple[int, tuple[SlotId, ...]]:
        first, end = self._dirty.take()
        first = max(first, self.first)  # what was released meanwhile is not read any more
        return first, tuple(self.slots[first - self.first : max(end, first) - self.first])

    def max_step_tokens(self, planned_tokens: int, n_tokens: int, sampled_position: int) -> int:
        """A step may be planned while another is computed. Where there are slots for one lease
        alone, the second step is cut short.
        """
        group = self.group
        room_tokens = (self.first + group.slots.n_slots) * group.block_size - planned_tokens
        return min(n_tokens, group.step_tokens, room_tokens)

    def plan(self, table: BlockTable, planned: PlannedTokens, ops: list[StepOp]) -> None:
        group, stop = self.group, self.first + len(self.slots)
        for entry, copy in planned.copies.items():
            if self.first <= entry < stop:
                source = self.slots[entry - self.first]
                target = self.slots[entry - self.first] = group.allocate(table[entry])
                group.slots.release(source)
                self._dirty.add(entry, entry + 1)
                ids = BlockId(source), BlockId(target)
                ops.append((When.FIRST, CopyBlock(*ids, copy.n_tokens, group.index)))
        end = blocks_for(planned.end, table.block_size)
        if stop < end:
            self.slots += map(group.allocate, table[stop:end])
            self._dirty.add(stop, end)

    def advance(self, table: BlockTable, written_tokens: int) -> bool:
        needed = self.group.required_blocks(written_tokens).start
        while self.first < needed and self.slots:
            self.group.slots.release(self.slots.pop(0))
            self.first += 1
        return False

    def checkpoint(self, n_tokens: int) -> None:
        """A window can be resumed at every token that it still has."""

    def snapshot(self, ops: list[StepOp]) -> None:
        """Other tokens can be written over a draft's."""

    def end_snapshot(self, *, is_accepted: bool) -> None:
        """There is none."""

    def donate(
        self, last_block: BlockId, block_tokens: int, ahead_tokens: int, ops: list[StepOp]
    ) -> None:
        """Slots are attached to their blocks when they are allocated."""


class WindowGroup(Group):
    """The `index`-th group: layers whose tokens see themselves and the `window - 1` before them.

    A lease computes at most `step_tokens` tokens in a step.
    """

    def __init__(
        self, index: int, window: int, n_slots: int, block_size: int, step_tokens: int
    ) -> None:
        super().__init__(f"window-{window}", n_slots, block_size)
        self.index = index
        self.window = window
        self.step_tokens = step_tokens
        self._lease_slots = lease_slots(window, block_size, step_tokens)

    def resume_point(self, blocks: Sequence[BlockId], n_tokens: int) -> int:
        while n_tokens:
            entries = reversed(self.required_blocks(n_tokens))
            missing = (entry for entry in entries if not self.slots.attached_to(blocks[entry]))
            if (entry := next(missing, None)) is None:
                break
            n_tokens = entry * self.block_size
        return n_tokens

    def required_blocks(self, n_tokens: int) -> range:
        first = first_needed(n_tokens, self.window, self.block_size)
        return range(first, blocks_for(n_tokens, self.block_size))

    def has_room(self) -> bool:
        return (self.n_leases + 1) * self._lease_slots <= self.slots.n_slots

    def admit(
        self, blocks: Sequence[BlockId], n_tokens: int, end_tokens: int, ops: list[StepOp]
    ) -> GroupState:
        required = self.required_blocks(n_tokens)
        slots = [self.slots.attached_to(blocks[entry])[self.block_size] for entry in required]
        for slot in slots:
            self.slots.retain(slot)
        return WindowState(self, required.start, slots)

    def allocate(self, block: BlockId) -> SlotId:
        """A slot for the tokens of `block`, attached to it. `has_room` kept one for the lease."""
        slot = self.slots.allocate()
        assert slot is not None, f"{self.name}: leases hold more than was kept for them"
        self.slots.attach(block, self.block_size, slot)
        return slot

    def attached(self, block: BlockId, n_tokens: int) -> SlotId | None:
        return self.slots.attached_to(block).get(self.block_size)

    def fill(
        self, block: BlockId, n_tokens: int, data: bytes | memoryview, ops: list[StepOp]
    ) -> None:
        slot = self.slots.allocate_for(block, self.block_size)
        if slot is not None:
            ops.append((When.FIRST, FillBlock(BlockId(slot), data, self.index)))

    def revoke(self, op: StorageOp) -> None:
        """Revoke fills only: a copy belongs to a lease whose step has failed, too."""
        if isinstance(op, FillBlock) and op.group == self.index:
            self.slots.detach(SlotId(op.block))
