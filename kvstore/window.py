"""Sliding windows: a lease retains the slots of the last `window` tokens and releases the others.

A window's block is a slot, attached to the block of the same tokens. It stays cached when a lease's
window has moved on, until another lease needs the slot.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set

from kvstore.ops import CopyBlock, CopyWindowBlock, FillWindow, StorageOp
from kvstore.pool import BlockTable, Journal, blocks_for
from kvstore.slots import NEVER, GroupSlotPool, GroupState, GroupStats
from kvstore.types import BlockId, Finding, SlotId

_WHOLE = 0  # a window's slot is attached at 0 tokens: it fills as its block does


class WindowState:
    """`slots[i]` is the window's block for entry `first + i` of the lease's table."""

    def __init__(self, group: "WindowGroup", first: int, slots: list[SlotId]) -> None:
        self.first = first
        self.slots = slots
        self.group = group
        self._journal = Journal()
        self._journal.note(first, first + len(slots))

    def max_step_tokens(self, planned_tokens: int, n_tokens: int, last_position: int) -> int:
        """A step is planned while the one before is computed, so two of them may be held: where
        there is one lease's room alone, the second is cut short.
        """
        room_tokens = self.group.end_tokens(self.first) - planned_tokens
        return min(n_tokens, self.group.step_tokens, room_tokens)

    def checkpoint(self, n_tokens: int) -> None:
        """The blocks are there for as long as nobody else needs them more."""

    def extend(
        self,
        table: BlockTable,
        planned_tokens: int,
        n_tokens: int,
        copies: Mapping[BlockId, CopyBlock],
    ) -> Sequence[StorageOp]:
        first = max(self.first, planned_tokens // table.block_size)  # none above is copied
        ops = [
            self._copy_on_write(index, copy)
            for index in range(first, self.first + len(self.slots))
            if (copy := copies.get(table[index])) is not None
        ]
        begun = self.first + len(self.slots)
        end = blocks_for(planned_tokens + n_tokens, table.block_size)
        for index in range(begun, end):
            self.slots.append(self.group.begin(table[index]))
        self._journal.note(begun, end)
        return ops

    def ready_tokens(self, planned_tokens: int) -> int:
        return NEVER

    def save(self, planned_tokens: int) -> Sequence[StorageOp]:
        """Slots are attached to their blocks from the beginning."""
        return ()

    def keep_back(self, planned_tokens: int, n_tokens: int) -> Sequence[StorageOp] | None:
        return ()

    def go_back(self) -> None:
        """Other tokens are written where some were."""

    def go_on(self) -> None:
        """Nothing was kept."""

    def due_tokens(self) -> int:
        return NEVER

    def advance(self, table: BlockTable, written_tokens: int) -> bool:
        needed = self.group.first_needed(written_tokens)
        while self.first < needed and self.slots:
            self.group.slots.release(self.slots.pop(0))
            self.first += 1
        return False

    def take_changes(self) -> Iterator[tuple[int, tuple[SlotId, ...]]]:
        for changed, end in self._journal.take():
            first = max(changed, self.first)  # what it has let go of since is read no more
            yield first, tuple(self.slots[first - self.first : end - self.first])

    def donate(
        self, last_block: BlockId, block_tokens: int, ahead_tokens: int
    ) -> Sequence[StorageOp]:
        """The slots are attached to their blocks already."""
        return ()

    def release(self) -> None:
        self.group.end(self.slots)
        self.slots.clear()

    def _copy_on_write(self, index: int, copy: CopyBlock) -> StorageOp:
        source = self.slots[index - self.first]
        target = self.slots[index - self.first] = self.group.begin(copy.target)
        self._journal.note(index, index + 1)
        self.group.slots.release(source)
        return CopyWindowBlock(self.group.index, source, target, copy.n_tokens)


class WindowGroup:
    """The `index`-th group: layers whose tokens see themselves and the `window - 1` before them.

    A lease computes at most `step_tokens` tokens in a step.
    """

    rewinds = True

    def __init__(
        self, index: int, window: int, n_slots: int, block_size: int, step_tokens: int
    ) -> None:
        self.name = f"window-{window}"
        self.index = index
        self.window = window
        self.step_tokens = step_tokens
        self.slots = GroupSlotPool(n_slots)
        self._block_size = block_size
        self._leases = 0
        self._lease_slots = lease_slots(window, block_size, step_tokens)

    def first_needed(self, n_tokens: int) -> int:
        """The entry of the table with the first token that the one at `n_tokens` sees."""
        return first_needed(n_tokens, self.window, self._block_size)

    def end_tokens(self, first: int) -> int:
        """Where all slots together end, if the first is for that entry of a table."""
        return (first + self.slots.n_slots) * self._block_size

    def resume_point(self, blocks: Sequence[BlockId], n_tokens: int) -> int:
        while n_tokens:
            missing = self._last_missing(blocks, n_tokens)
            if missing is None:
                break
            n_tokens = missing * self._block_size
        return n_tokens

    def count_unresumable(self, n_tokens: int) -> None:
        self.slots.unresumable_tokens += n_tokens

    def has_room(self) -> bool:
        return (self._leases + 1) * self._lease_slots <= self.slots.n_slots

    def admit(
        self, blocks: Sequence[BlockId], n_tokens: int, end_tokens: int
    ) -> tuple[GroupState, Sequence[StorageOp]]:
        first = self.first_needed(n_tokens)
        slots = [
            self.slots.attached_to(block)[_WHOLE]
            for block in blocks[first : blocks_for(n_tokens, self._block_size)]
        ]
        for slot in slots:
            self.slots.retain(slot)
        self._leases += 1
        return WindowState(self, first, slots), ()

    def begin(self, block: BlockId) -> SlotId:
        """A slot for the same tokens as `block`, attached to it.

        There is one: no lease holds more than the room that `has_room` kept for it.
        """
        slot = self.slots.allocate()
        assert slot is not None, f"{self.name}: leases hold more than was kept for them"
        self.slots.attach(block, _WHOLE, slot)
        return slot

    def end(self, slots: Sequence[SlotId]) -> None:
        """A lease is over, and lets go of its slots."""
        for slot in slots:
            self.slots.release(slot)
        self._leases -= 1

    def copy(self, source: BlockId, target: BlockId, n_tokens: int) -> None:
        """A copy will be written to, and gets a slot of its own in `extend`."""

    def repoint(self, old: BlockId, new: BlockId) -> None:
        """`new` may have lost its own slot: then it gets that of `old`."""
        self.slots.copy(old, new, _WHOLE)

    def needed(self, n_tokens: int) -> range:
        return range(self.first_needed(n_tokens), blocks_for(n_tokens, self._block_size))

    def attached(self, block: BlockId, n_tokens: int) -> SlotId | None:
        return self.slots.attached_to(block).get(_WHOLE)

    def stops(self, block: BlockId) -> Collection[int] | None:
        return None

    def fill(self, block: BlockId, n_tokens: int, data: bytes) -> StorageOp | None:
        slot = self.slots.allocate_for(block, _WHOLE)
        return None if slot is None else FillWindow(self.index, slot, data)

    def forget(self, block: BlockId) -> None:
        self.slots.forget(block)

    def revoke(self, ops: Sequence[StorageOp]) -> None:
        """Copies of blocks are for leases whose step has failed, too."""
        for op in ops:
            if isinstance(op, FillWindow) and op.group == self.index:
                self.slots.detach(op.slot)

    def when_attached(self, tell: Callable[[BlockId], None]) -> None:
        self.slots.when_attached(tell)

    def stats(self) -> GroupStats:
        return self.slots.stats(self.name)

    def problems(self, states: Sequence[GroupState], known: Set[BlockId]) -> Iterator[Finding]:
        held = Counter(
            slot for state in states if isinstance(state, WindowState) for slot in state.slots
        )
        for found in self.slots.problems(held):
            yield found and f"{self.name}: {found}"
        if self._leases != len(states):
            yield f"{self.name}: {self._leases} leases, recounted {len(states)}"
        if strangers := self.slots.blocks() - known:
            yield f"{self.name}: slots are attached to free blocks {sorted(strangers)}"

    def _last_missing(self, blocks: Sequence[BlockId], n_tokens: int) -> int | None:
        last = (n_tokens - 1) // self._block_size
        for index in range(last, self.first_needed(n_tokens) - 1, -1):
            if not self.slots.attached_to(blocks[index]):
                return index
        return None


def first_needed(n_tokens: int, window: int, block_size: int) -> int:
    """The entry of a table with the first token that the one at `n_tokens` sees."""
    return max(n_tokens - window + 1, 0) // block_size


def lease_slots(window: int, block_size: int, step_tokens: int) -> int:
    """The most slots that one lease holds: its window and a step, at any place in their blocks."""
    return blocks_for(window + step_tokens, block_size) + 2
