"""Recurrent layers: each lease has one running state, and states are saved where others resume.

A state stands for all tokens before it, so it serves at exactly its position. A saved
state is attached to a block at `n` of its tokens: it stands for those `n` and all before. States
are saved where a prompt ends, at every so many tokens of a long one, and where a prompt left what
was cached.
"""

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set

from kvstore.ops import CopyBlock, CopyState, FillState, ResetState, RollBackState, StorageOp
from kvstore.pool import BlockTable, blocks_for
from kvstore.slots import NEVER, GroupSlotPool, GroupState, GroupStats
from kvstore.types import BlockId, Finding, SlotId


class RecurrentState:
    """`slot` has the lease's state, behind the tokens of all steps that have been planned."""

    def __init__(self, group: "RecurrentGroup", slot: SlotId, checkpoints: set[int]) -> None:
        self.slot = slot
        self._group = group
        self._checkpoints = checkpoints
        self._saving: deque[tuple[int, SlotId]] = deque()  # tokens, and where the state goes
        self._kept: SlotId | None = None  # the state before the step that is computed
        self._is_new = True

    def max_step_tokens(self, planned_tokens: int, n_tokens: int, last_position: int) -> int:
        end = planned_tokens + n_tokens
        inside = (c for c in self._checkpoints if planned_tokens < c < end and c != last_position)
        return min(inside, default=end) - planned_tokens

    def checkpoint(self, n_tokens: int) -> None:
        self._checkpoints.add(n_tokens)

    def extend(
        self,
        table: BlockTable,
        planned_tokens: int,
        n_tokens: int,
        copies: Mapping[BlockId, CopyBlock],
    ) -> Sequence[StorageOp]:
        return ()

    def ready_tokens(self, planned_tokens: int) -> int:
        return min((c - 1 for c in self._checkpoints if c > planned_tokens), default=NEVER)

    def save(self, planned_tokens: int) -> Sequence[StorageOp]:
        if planned_tokens not in self._checkpoints:
            return ()
        self._checkpoints.discard(planned_tokens)
        target = self._group.begin_saving()
        if target is None:
            return ()
        self._saving.append((planned_tokens, target))
        return (CopyState(self.slot, target),)

    def keep_back(self, planned_tokens: int, n_tokens: int) -> Sequence[StorageOp] | None:
        """A state knows no tokens, so it cannot be rid of some: a copy is kept."""
        end = planned_tokens + n_tokens
        if self._saving or any(planned_tokens < c <= end for c in self._checkpoints):
            return None  # what is saved in this step would have the other tokens, too
        self._kept = self._group.begin_saving()
        return None if self._kept is None else (CopyState(self.slot, self._kept),)

    def go_back(self) -> None:
        if self._kept is not None:
            self._group.restore(self.slot)
            self.slot, self._kept = self._kept, None
            self._is_new = True

    def go_on(self) -> None:
        if self._kept is not None:
            self._group.end_saving(self._kept)
            self._kept = None

    def due_tokens(self) -> int:
        return self._saving[0][0] if self._saving else NEVER

    def advance(self, table: BlockTable, written_tokens: int) -> bool:
        n_saving = len(self._saving)
        while self._saving and self._saving[0][0] <= written_tokens:
            saved_tokens, slot = self._saving.popleft()
            index, before = divmod(saved_tokens - 1, table.block_size)
            self._group.slots.attach(table[index], before + 1, slot)
            self._group.end_saving(slot)
        return len(self._saving) < n_saving

    def take_changes(self) -> Sequence[tuple[int, tuple[SlotId, ...]]]:
        """It has one slot, which is another one when it has gone back."""
        is_new, self._is_new = self._is_new, False
        return ((0, (self.slot,)),) if is_new else ()

    def donate(
        self, last_block: BlockId, block_tokens: int, ahead_tokens: int
    ) -> Sequence[StorageOp]:
        """The running state becomes a saved one: nobody will run it on."""
        if block_tokens in self._group.slots.attached_to(last_block):
            return ()
        self._group.slots.attach(last_block, block_tokens, self.slot)
        return (RollBackState(self.slot),) if ahead_tokens else ()

    def release(self) -> None:
        for _, slot in self._saving:
            self._group.end_saving(slot)
        self._saving.clear()
        self.go_on()
        self._group.end(self.slot)

    def slots(self) -> Iterator[SlotId]:
        """All slots that it uses."""
        yield self.slot
        yield from (slot for _, slot in self._saving)
        if self._kept is not None:
            yield self._kept


class RecurrentGroup:
    """States, of which `n_running` are kept for leases and the others can be saved.

    A long prompt is saved every `interval_tokens` tokens.
    """

    name = "recurrent"
    rewinds = False  # a state knows nothing of the tokens before the last

    def __init__(self, n_running: int, n_saved: int, block_size: int, interval_tokens: int) -> None:
        self.slots = GroupSlotPool(n_running + n_saved)
        self._n_running = n_running
        self._n_saved = n_saved
        self.block_size = block_size
        self._interval_tokens = interval_tokens
        self._leases = 0
        self._n_saving = 0

    def resume_point(self, blocks: Sequence[BlockId], n_tokens: int) -> int:
        last = (n_tokens - 1) // self.block_size if n_tokens else -1
        for index in range(last, -1, -1):
            start = index * self.block_size
            saved = self.slots.attached_to(blocks[index])
            if best := max((n for n in saved if start + n <= n_tokens), default=0):
                return start + best
        return 0

    def count_unresumable(self, n_tokens: int) -> None:
        self.slots.unresumable_tokens += n_tokens

    def has_room(self) -> bool:
        return self._leases < self._n_running

    def admit(
        self, blocks: Sequence[BlockId], n_tokens: int, end_tokens: int
    ) -> tuple[GroupState, Sequence[StorageOp]]:
        saved = self._saved(blocks, n_tokens)
        slot, ops = self._new() if saved is None else self._resumed(saved)
        self._leases += 1
        return RecurrentState(self, slot, self._checkpoints(n_tokens, end_tokens)), ops

    def begin_saving(self) -> SlotId | None:
        """A slot for a state that a step in flight will leave; None where there is no room."""
        if self._n_saving == self._n_saved:
            return None
        slot = self.slots.allocate()
        if slot is not None:
            self._n_saving += 1
        return slot

    def end_saving(self, slot: SlotId) -> None:
        """The state is attached to a block now, or not needed."""
        self.slots.release(slot)
        self._n_saving -= 1

    def restore(self, slot: SlotId) -> None:
        """A lease goes on from the state that it was saving, and lets go of this one."""
        self.slots.release(slot)
        self._n_saving -= 1

    def end(self, slot: SlotId) -> None:
        """A lease is over, and lets go of its slot."""
        self.slots.release(slot)
        self._leases -= 1

    def copy(self, source: BlockId, target: BlockId, n_tokens: int) -> None:
        self.slots.copy(source, target, n_tokens)

    def repoint(self, old: BlockId, new: BlockId) -> None:
        self.copy(old, new, self.block_size)

    def needed(self, n_tokens: int) -> range:
        end = blocks_for(n_tokens, self.block_size)
        return range(end - 1, end)

    def attached(self, block: BlockId, n_tokens: int) -> SlotId | None:
        return self.slots.attached_to(block).get(n_tokens)

    def stops(self, block: BlockId) -> Collection[int] | None:
        return self.slots.attached_to(block)

    def fill(self, block: BlockId, n_tokens: int, data: bytes) -> StorageOp | None:
        slot = self.slots.allocate_for(block, n_tokens)
        return None if slot is None else FillState(slot, data)

    def forget(self, block: BlockId) -> None:
        self.slots.forget(block)

    def revoke(self, ops: Sequence[StorageOp]) -> None:
        for op in ops:
            if isinstance(op, RollBackState | FillState):
                self.slots.detach(op.slot)

    def when_attached(self, tell: Callable[[BlockId], None]) -> None:
        self.slots.when_attached(tell)

    def stats(self) -> GroupStats:
        return self.slots.stats(self.name)

    def problems(self, states: Sequence[GroupState], known: Set[BlockId]) -> Iterator[Finding]:
        held = Counter(
            slot for state in states if isinstance(state, RecurrentState) for slot in state.slots()
        )
        for found in self.slots.problems(held):
            yield found and f"{self.name}: {found}"
        if self._leases != len(states):
            yield f"{self.name}: {self._leases} leases, recounted {len(states)}"
        if strangers := self.slots.blocks() - known:
            yield f"{self.name}: states are attached to free blocks {sorted(strangers)}"

    def _new(self) -> tuple[SlotId, Sequence[StorageOp]]:
        slot = self.slots.allocate()
        assert slot is not None, "leases hold more states than were kept for them"
        return slot, (ResetState(slot),)

    def _resumed(self, saved: SlotId) -> tuple[SlotId, Sequence[StorageOp]]:
        """A copy of the saved state; where there is no room for one, the saved state itself."""
        self.slots.retain(saved)  # lest it be evicted for its own copy
        slot = self.slots.allocate()
        if slot is None:
            self.slots.detach(saved)
            return saved, ()
        self.slots.release(saved)
        return slot, (CopyState(saved, slot),)

    def _saved(self, blocks: Sequence[BlockId], n_tokens: int) -> SlotId | None:
        if n_tokens == 0:
            return None
        index, block_tokens = divmod(n_tokens - 1, self.block_size)
        slot = self.slots.attached_to(blocks[index])[block_tokens + 1]
        self.slots.touch(slot)
        return slot

    def _checkpoints(self, n_tokens: int, end_tokens: int) -> set[int]:
        """Where the prompt ends, with its last token and without; on the way, every interval."""
        if self._n_saved == 0:
            return set()
        first = n_tokens - n_tokens % self._interval_tokens + self._interval_tokens
        on_the_way = range(first, end_tokens - 1, self._interval_tokens)
        return {end_tokens - 1, end_tokens, *on_the_way}
