"""Groups of layers that keep something other than blocks: their slots, and their base classes.

A window group keeps a slot for each block of a sliding window; a recurrent group keeps one state
for each lease. Slots are attached to blocks, and are found and evicted with them.
"""

import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvstore.ops import CopyBlock, StepOp, StorageOp
from kvstore.pool import BlockTable
from kvstore.types import BlockId, Finding, SlotId

NEVER = sys.maxsize
"""More tokens than any sequence has."""


@dataclass(frozen=True, slots=True)
class GroupStats:
    """A group's storage at one moment, in slots: a window's blocks, or states."""

    name: str
    total: int
    free: int
    cached: int  # used by no lease; what eviction can free
    held: int  # used by leases
    saved: int  # by sharing: uses beyond the first of each slot
    evictions: int
    unresumable_tokens: int  # matched by prompts, and computed again because a slot was missing


class SlotPool:
    """Reference counts and attachments of a group's `n_slots` slots.

    Each lease that computes with a slot holds one reference to it; `ref_count` counts these. A slot
    is *attached* to blocks, at a number of tokens in each: how many of the block's tokens it
    accounts for. Without references it is evictable if it is attached to a block, else free.
    """

    def __init__(self, n_slots: int) -> None:
        if n_slots < 1:
            raise ValueError(f"a group needs at least one slot, not {n_slots}")
        self.n_slots: Final = n_slots
        self._ref_counts = [0] * n_slots
        self._blocks_of: list[set[tuple[BlockId, int]]] = [set() for _ in range(n_slots)]
        self._slots_of: dict[BlockId, dict[int, SlotId]] = {}
        self._free = [SlotId(slot) for slot in reversed(range(n_slots))]
        self._evictable: dict[SlotId, None] = {}  # the least recently used first
        self.on_attach: Callable[[BlockId], None] | None = None
        """Called with each block to which one more slot is attached."""
        self.n_references = 0  # of all leases to all slots
        self.evictions = 0
        self.unresumable_tokens = 0  # counted by the store

    @property
    def n_free(self) -> int:
        return len(self._free)

    @property
    def n_evictable(self) -> int:
        """Number of attached slots without references: what eviction can free."""
        return len(self._evictable)

    @property
    def n_referenced(self) -> int:
        return self.n_slots - self.n_free - self.n_evictable

    @property
    def n_saved(self) -> int:
        """Number of slots saved by sharing: references beyond the first of each slot."""
        return self.n_references - self.n_referenced

    def ref_count(self, slot: SlotId) -> int:
        return self._ref_counts[slot]

    def free_slots(self) -> Sequence[SlotId]:
        return tuple(self._free)

    def attached_to(self, block: BlockId) -> Mapping[int, SlotId]:
        """The slots that are attached to a block, by number of tokens."""
        return self._slots_of.get(block, {})

    def blocks(self) -> frozenset[BlockId]:
        """The blocks with a slot attached."""
        return frozenset(self._slots_of)

    def allocate(self) -> SlotId | None:
        """A free slot with one reference, evicting the least recently used if none is free.

        None if leases use all slots.
        """
        if not self._free:
            if not self._evictable:
                return None
            self.evictions += 1
            self.detach(next(iter(self._evictable)))
        slot = self._free.pop()
        self._ref_counts[slot] = 1
        self.n_references += 1
        return slot

    def retain(self, slot: SlotId) -> None:
        """Add a lease's reference. Raises ValueError for a free slot."""
        if self._ref_counts[slot] == 0:
            if slot not in self._evictable:
                raise ValueError(f"slot {slot} is free and cannot be retained")
            del self._evictable[slot]
        self._ref_counts[slot] += 1
        self.n_references += 1

    def release(self, slot: SlotId) -> None:
        """Drop a lease's reference. Raises ValueError when no lease has one."""
        if self._ref_counts[slot] == 0:
            raise ValueError(f"slot {slot} is used by no lease")
        self._ref_counts[slot] -= 1
        self.n_references -= 1
        self._reclassify(slot)

    def attach(self, block: BlockId, n_tokens: int, slot: SlotId) -> None:
        """Attach a slot that is not free to a block, unless the block has one at `n_tokens`."""
        attached = self._slots_of.setdefault(block, {})
        if n_tokens not in attached:
            attached[n_tokens] = slot
            self._blocks_of[slot].add((block, n_tokens))
            if self.on_attach is not None:
                self.on_attach(block)

    def allocate_for(self, block: BlockId, n_tokens: int) -> SlotId | None:
        """Attach to the block a slot that no lease uses. None if leases use all slots."""
        slot = self.allocate()
        if slot is not None:
            self.attach(block, n_tokens, slot)
            self.release(slot)
        return slot

    def copy(self, source: BlockId, target: BlockId, n_tokens: int) -> None:
        """Attach slots of `source` to `target`, which begins with the same `n_tokens` tokens."""
        for count, slot in tuple(self.attached_to(source).items()):
            if count <= n_tokens:
                self.attach(target, count, slot)

    def forget(self, block: BlockId) -> None:
        """Detach all slots from a block that is free."""
        for n_tokens, slot in self._slots_of.pop(block, {}).items():
            self._blocks_of[slot].discard((block, n_tokens))
            self._reclassify(slot)

    def detach(self, slot: SlotId) -> None:
        """Detach the slot from all blocks."""
        if not self._blocks_of[slot]:
            return
        for block, n_tokens in self._blocks_of[slot]:
            del self._slots_of[block][n_tokens]
            if not self._slots_of[block]:
                del self._slots_of[block]
        self._blocks_of[slot].clear()
        self._reclassify(slot)

    def problems(self, leases: Counter[SlotId]) -> Iterator[Finding]:
        """Recount the slots, given how many leases use each."""
        free, evictable = set(self._free), set(self._evictable)
        if len(free) != len(self._free):
            yield "a slot stands in the free list twice"
        for slot in map(SlotId, range(self.n_slots)):
            blocks = self._blocks_of[slot]
            if self._ref_counts[slot] != leases[slot]:
                yield f"slot {slot}: {self.ref_count(slot)} references, {leases[slot]} leases"
            is_unused = self._ref_counts[slot] == 0
            expected = is_unused and not blocks, is_unused and bool(blocks)
            if (slot in free, slot in evictable) != expected:
                state = slot in free, slot in evictable
                yield f"slot {slot}: free, evictable is {state}, not {expected}"
            for block, n_tokens in blocks:
                if self._slots_of.get(block, {}).get(n_tokens) != slot:
                    yield f"slot {slot}: block {block} does not have it at {n_tokens} tokens"
            yield None
        saved = sum(count - 1 for count in leases.values())
        if self.n_saved != saved:
            yield f"{self.n_saved} slots saved, recounted {saved}"
        attached = sum(map(len, self._slots_of.values()))
        if attached != sum(map(len, self._blocks_of)):
            yield f"blocks have {attached} slots attached, which have other blocks"

    def _reclassify(self, slot: SlotId) -> None:
        """File the slot as evictable or free, unless a lease uses it."""
        if self._ref_counts[slot]:
            return
        if self._blocks_of[slot]:
            self._evictable.setdefault(slot)
        else:
            self._evictable.pop(slot, None)
            self._free.append(slot)


class PlannedTokens(NamedTuple):
    """Positions [start, end) of a lease, which the next step computes.

    The token at `sampled_position` is computed with the decodes, after all prefills. `copies` are
    the blocks that were just copied on write, by their entry of the table.
    """

    start: int
    end: int
    sampled_position: int
    copies: Mapping[int, CopyBlock]


class GroupState(ABC):
    """One lease's slots in one group, and what planned steps will do to them.

    `table` is the lease's own, up to date. The store calls `plan` for each step and `advance` when
    steps have been computed; the next step may be planned before that. It calls `release` once. Ops
    for the storage are appended to `ops`.
    """

    def __init__(self, group: "Group") -> None:
        self.group = group
        group.n_leases += 1

    @abstractmethod
    def held_slots(self) -> Iterator[SlotId]:
        """Each slot to which the lease has a reference."""

    @abstractmethod
    def take_changes(self) -> tuple[int, tuple[SlotId, ...]]:
        """A run of entries with all changes since the last call: its first entry, its slots."""

    def max_step_tokens(self, planned_tokens: int, n_tokens: int, sampled_position: int) -> int:
        """Number of the next `n_tokens` tokens that one step may compute, at least one."""
        return n_tokens

    @abstractmethod
    def checkpoint(self, n_tokens: int) -> None:
        """Save the state after `n_tokens` tokens, where a later request will want to resume."""

    @abstractmethod
    def plan(self, table: BlockTable, planned: PlannedTokens, ops: list[StepOp]) -> None:
        """Make the positions of the next step writable, and queue the saves that are due in it."""

    def ready_tokens(self, planned_tokens: int) -> int:
        """Number of tokens up to which steps may be planned without a call of `plan`."""
        return NEVER

    def due_tokens(self) -> int:
        """Number of written tokens at which `advance` has to attach something that was saved."""
        return NEVER

    def can_snapshot(self, start: int, end: int) -> bool:
        """Whether `snapshot` can prepare for draft tokens [start, end) in the next step."""
        return True

    @abstractmethod
    def snapshot(self, ops: list[StepOp]) -> None:
        """Snapshot the state that the next step overwrites, so that its draft tokens can be rolled
        back.
        """

    @abstractmethod
    def end_snapshot(self, *, is_accepted: bool) -> None:
        """Release the snapshot, if there is one. Return to it unless the draft `is_accepted`."""

    def advance(self, table: BlockTable, written_tokens: int) -> bool:
        """Take note that the lease has written `written_tokens`, to a block's end or what is due.

        Returns whether a slot was attached to one of its blocks.
        """
        return False

    @abstractmethod
    def donate(
        self, last_block: BlockId, block_tokens: int, ahead_tokens: int, ops: list[StepOp]
    ) -> None:
        """Leave slots to the prefix cache: the lease ends, and is released next.

        The tokens that it wrote end in the indexed `last_block`, at `block_tokens`. Submitted steps
        add `ahead_tokens` more to its state, which are undone before the state is used again.
        """

    def release(self) -> None:
        """End the lease's use of the group."""
        for slot in self.held_slots():
            self.group.slots.release(slot)
        self.group.n_leases -= 1


class Group(ABC):
    """Layers that keep one kind of cache, with the slots of their storage."""

    can_truncate = True
    """Whether a lease can write other tokens over the last that it has written."""

    def __init__(self, name: str, n_slots: int, block_size: int) -> None:
        self.name = name
        self.slots = SlotPool(n_slots)
        self.block_size = block_size
        self.n_leases = 0

    @property
    def resume_multiple(self) -> int:
        """Of a running lease's tokens, others can resume after multiples of this number only."""
        return 1

    @abstractmethod
    def resume_point(self, blocks: Sequence[BlockId], n_tokens: int) -> int:
        """The last position up to `n_tokens` at which a lease of these blocks could resume."""

    @abstractmethod
    def required_blocks(self, n_tokens: int) -> range:
        """The entries of a table whose slots must exist to resume at `n_tokens`."""

    def resume_offsets(self, block: BlockId) -> Collection[int] | None:
        """The numbers of the block's tokens after which a lease can resume; None: after each."""
        return None

    @abstractmethod
    def has_room(self) -> bool:
        """Whether one more lease will always find the slots that it needs."""

    @abstractmethod
    def admit(
        self, blocks: Sequence[BlockId], n_tokens: int, end_tokens: int, ops: list[StepOp]
    ) -> GroupState:
        """The state of a new lease that resumes at `n_tokens` of `end_tokens`."""

    def attached(self, block: BlockId, n_tokens: int) -> SlotId | None:
        """The slot that is attached to a block for its first `n_tokens` tokens."""
        return self.slots.attached_to(block).get(n_tokens)

    @abstractmethod
    def fill(
        self, block: BlockId, n_tokens: int, data: bytes | memoryview, ops: list[StepOp]
    ) -> None:
        """Attach a slot to the block and fill it with `data`, if there is a slot.

        No lease uses the slot, so it can be evicted.
        """

    @abstractmethod
    def revoke(self, op: StorageOp) -> None:
        """The op was perhaps not carried out: detach a slot whose content rests on it."""

    def stats(self) -> GroupStats:
        """The counts of slots. Safe on any thread: the counts add up even if a slot moves between
        two reads.
        """
        slots = self.slots
        total, free = slots.n_slots, slots.n_free
        cached = min(slots.n_evictable, total - free)
        return GroupStats(
            name=self.name,
            total=total,
            free=free,
            cached=cached,
            held=total - free - cached,
            saved=max(slots.n_saved, 0),
            evictions=slots.evictions,
            unresumable_tokens=slots.unresumable_tokens,
        )

    def problems(self, states: Sequence[GroupState], used: Set[BlockId]) -> Iterator[Finding]:
        """Recount the group, given the states of all leases and the blocks that are not free."""
        held = Counter(slot for state in states for slot in state.held_slots())
        for found in self.slots.problems(held):
            yield found and f"{self.name}: {found}"
        if self.n_leases != len(states):
            yield f"{self.name}: {self.n_leases} leases, recounted {len(states)}"
        if strangers := self.slots.blocks() - used:
            yield f"{self.name}: slots are attached to free blocks {sorted(strangers)}"
