"""Groups of layers that keep something other than blocks: their slots, and their interface."""

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from kvstore.ops import CopyBlock, StorageOp
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
    unresumable_tokens: int  # matched by prompts, and computed again for want of a slot


class GroupState(Protocol):
    """What one lease has of one group: its slots, and what is planned for them.

    `table` is the lease's, brought up to date before each call. The calls come in the order in
    which the lease lives: max_step_tokens, extend, save and, when that step has been computed,
    advance, again and again, and release once. The next step may be planned before an advance.
    """

    def max_step_tokens(self, planned_tokens: int, n_tokens: int, last_position: int) -> int:
        """How many of the next `n_tokens` one step may compute (at least one).

        Something can be saved where they end, and at `last_position` if that is among them.
        """
        ...

    def checkpoint(self, n_tokens: int) -> None:
        """Somebody will want to resume where this lease will have written `n_tokens`."""
        ...

    def extend(
        self,
        table: BlockTable,
        planned_tokens: int,
        n_tokens: int,
        copies: Mapping[BlockId, CopyBlock],
    ) -> Sequence[StorageOp]:
        """Make the next positions writable. `copies`: what was just copied, by target."""
        ...

    def ready_tokens(self, planned_tokens: int) -> int:
        """How many tokens may be planned before something is to be saved."""
        ...

    def save(self, planned_tokens: int) -> Sequence[StorageOp]:
        """A step will have written so many tokens. Returns the ops that save the state there."""
        ...

    def keep_back(self, planned_tokens: int, n_tokens: int) -> Sequence[StorageOp] | None:
        """Be ready to go back to what there is before the next step, in which `planned_tokens` end
        and so many more may turn out to be others. Returns the ops for that, before the step; none
        where nothing is needed to write other tokens; None where that cannot be.
        """
        ...

    def go_back(self) -> None:
        """Go on from what was kept."""
        ...

    def go_on(self) -> None:
        """What was kept is not needed."""
        ...

    def due_tokens(self) -> int:
        """How many tokens are written when the next planned save has been made."""
        ...

    def advance(self, table: BlockTable, written_tokens: int) -> bool:
        """The lease has written so many tokens. Returns whether something was saved there.

        Called where a block ends and where something is to be saved.
        """
        ...

    def take_changes(self) -> Iterable[tuple[int, tuple[SlotId, ...]]]:
        """Runs of entries that have changed since this was last asked, and their slots."""
        ...

    def donate(
        self, last_block: BlockId, block_tokens: int, ahead_tokens: int
    ) -> Sequence[StorageOp]:
        """The lease has ended: what it wrote ends in the indexed `last_block`, at `block_tokens`.

        Steps in flight write `ahead_tokens` more, which are not needed.
        """
        ...

    def release(self) -> None:
        """Release all slots."""
        ...


class Group(Protocol):
    """Layers that keep one kind of cache, and its storage."""

    name: str
    rewinds: bool  # whether a lease can write other tokens where it has written some

    def resume_point(self, blocks: Sequence[BlockId], n_tokens: int) -> int:
        """The last position up to `n_tokens` at which a lease of these blocks could resume."""
        ...

    def count_unresumable(self, n_tokens: int) -> None:
        """A prompt matched so many tokens beyond the point where it can resume."""
        ...

    def has_room(self) -> bool:
        """Whether one more lease will always find the slots that it needs."""
        ...

    def admit(
        self, blocks: Sequence[BlockId], n_tokens: int, end_tokens: int
    ) -> tuple[GroupState, Sequence[StorageOp]]:
        """The state of a lease that resumes at `n_tokens` of `end_tokens`, and its ops."""
        ...

    def copy(self, source: BlockId, target: BlockId, n_tokens: int) -> None:
        """`target` begins with the same tokens as `source`, of which a lease has written these."""
        ...

    def repoint(self, old: BlockId, new: BlockId) -> None:
        """A table lists `new` in place of `old`: the same tokens, in a block that is indexed."""
        ...

    def needed(self, n_tokens: int) -> range:
        """The entries of a table of so many tokens whose slots it takes to resume behind them."""
        ...

    def attached(self, block: BlockId, n_tokens: int) -> SlotId | None:
        """The slot that is attached to a block for its first `n_tokens` tokens."""
        ...

    def stops(self, block: BlockId) -> Collection[int] | None:
        """After how many of the block's tokens a lease can resume; None: after each."""
        ...

    def fill(self, block: BlockId, n_tokens: int, data: bytes) -> StorageOp | None:
        """Attach a slot to the block, to be filled with `data`, which was read from one like it.

        None: there is no slot. No lease uses the slot, so it can be evicted.
        """
        ...

    def forget(self, block: BlockId) -> None:
        """The block is free."""
        ...

    def revoke(self, ops: Sequence[StorageOp]) -> None:
        """These ops were not, or perhaps not, executed: cache nothing that rests on them."""
        ...

    def when_attached(self, tell: Callable[[BlockId], None]) -> None:
        """Call `tell` with each block, when one more slot is attached to it."""
        ...

    def stats(self) -> GroupStats: ...

    def problems(self, states: Sequence[GroupState], known: Set[BlockId]) -> Iterator[Finding]:
        """What does not add up, given the states of all leases and the blocks that are not free."""
        ...


_NOTHING: Mapping[int, SlotId] = MappingProxyType({})


class GroupSlotPool:
    """`n_slots` slots of a group's storage.

    Each lease that computes with a slot holds one reference to it; `ref_count` counts these. A slot
    is *attached* to blocks, at a number of tokens in each: how many of the block's tokens it
    accounts for. Without references it is evictable if it is attached to a block, else free.
    """

    def __init__(self, n_slots: int) -> None:
        if n_slots < 1:
            raise ValueError(f"a group needs at least one slot, not {n_slots}")
        self._ref_counts = [0] * n_slots
        self._blocks_of: list[set[tuple[BlockId, int]]] = [set() for _ in range(n_slots)]
        self._slots_of: dict[BlockId, dict[int, SlotId]] = {}
        self._free = [SlotId(slot) for slot in reversed(range(n_slots))]
        self._evictable: dict[SlotId, None] = {}  # the least recently used first
        self._when_attached: list[Callable[[BlockId], None]] = []
        self._n_references = 0  # of all leases to all slots
        self.evictions = 0
        self.unresumable_tokens = 0  # counted by the group

    def when_attached(self, tell: Callable[[BlockId], None]) -> None:
        """Call `tell` with each block, when one more slot is attached to it."""
        self._when_attached.append(tell)

    @property
    def n_slots(self) -> int:
        return len(self._ref_counts)

    @property
    def n_free(self) -> int:
        return len(self._free)

    @property
    def n_evictable(self) -> int:
        """Slots without references, attached to blocks: what eviction can free."""
        return len(self._evictable)

    @property
    def n_referenced(self) -> int:
        return self.n_slots - self.n_free - self.n_evictable

    @property
    def n_saved(self) -> int:
        """Slots saved by sharing: references beyond the first of each slot."""
        return self._n_references - self.n_referenced

    def ref_count(self, slot: SlotId) -> int:
        return self._ref_counts[slot]

    def attached_to(self, block: BlockId) -> Mapping[int, SlotId]:
        """The slots that are attached to a block, by number of tokens."""
        return self._slots_of.get(block, _NOTHING)

    def allocate(self) -> SlotId | None:
        """A free slot with one reference, evicting the least recently used if none is free.

        None if leases use all slots.
        """
        if not self._free:
            if not self._evictable:
                return None
            self._evict(next(iter(self._evictable)))
        slot = self._free.pop()
        self._ref_counts[slot] = 1
        self._n_references += 1
        return slot

    def retain(self, slot: SlotId) -> None:
        """One more lease uses the slot. Raises ValueError for a free one."""
        if self._ref_counts[slot] == 0:
            if slot not in self._evictable:
                raise ValueError(f"slot {slot} is free and cannot be retained")
            del self._evictable[slot]
        self._ref_counts[slot] += 1
        self._n_references += 1

    def release(self, slot: SlotId) -> None:
        """One lease less uses the slot. Raises ValueError when none did."""
        if self._ref_counts[slot] == 0:
            raise ValueError(f"slot {slot} is used by no lease")
        self._ref_counts[slot] -= 1
        self._n_references -= 1
        self._settle(slot)

    def touch(self, slot: SlotId) -> None:
        """Make the slot the most recently used."""
        if slot in self._evictable:
            del self._evictable[slot]
            self._evictable[slot] = None

    def attach(self, block: BlockId, n_tokens: int, slot: SlotId) -> None:
        """Attach a slot that is not free to a block, unless the block has one at `n_tokens`."""
        attached = self._slots_of.setdefault(block, {})
        if n_tokens not in attached:
            attached[n_tokens] = slot
            self._blocks_of[slot].add((block, n_tokens))
            for tell in self._when_attached:
                tell(block)

    def allocate_for(self, block: BlockId, n_tokens: int) -> SlotId | None:
        """Attach a slot to the block that no lease uses. None if leases use all slots."""
        assert n_tokens not in self.attached_to(block), "the block has one already"
        slot = self.allocate()
        if slot is not None:
            self.attach(block, n_tokens, slot)
            self.release(slot)
        return slot

    def copy(self, source: BlockId, target: BlockId, n_tokens: int) -> None:
        """Attach to `target`, which begins with the same `n_tokens` tokens, what `source` has."""
        for count, slot in tuple(self.attached_to(source).items()):
            if count <= n_tokens:
                self.attach(target, count, slot)

    def forget(self, block: BlockId) -> None:
        """The block is free: detach all from it."""
        for n_tokens, slot in self._slots_of.pop(block, {}).items():
            self._blocks_of[slot].discard((block, n_tokens))
            self._settle(slot)

    def detach(self, slot: SlotId) -> None:
        """Detach the slot from all blocks, since it does not have what it should."""
        if not self._blocks_of[slot]:
            return
        for block, n_tokens in self._blocks_of[slot]:
            del self._slots_of[block][n_tokens]
            if not self._slots_of[block]:
                del self._slots_of[block]
        self._blocks_of[slot].clear()
        self._settle(slot)

    def stats(self, name: str) -> GroupStats:
        return GroupStats(
            name=name,
            total=self.n_slots,
            free=self.n_free,
            cached=self.n_evictable,
            held=self.n_referenced,
            saved=self.n_saved,
            evictions=self.evictions,
            unresumable_tokens=self.unresumable_tokens,
        )

    def problems(self, leases: Counter[SlotId]) -> Iterator[Finding]:
        """What does not add up, given how many leases use each slot."""
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

    def blocks(self) -> frozenset[BlockId]:
        """The blocks with a slot attached."""
        return frozenset(self._slots_of)

    def _evict(self, slot: SlotId) -> None:
        self.evictions += 1
        self.detach(slot)

    def _settle(self, slot: SlotId) -> None:
        """File the slot as evictable or free, unless a lease uses it."""
        if self._ref_counts[slot]:
            return
        if self._blocks_of[slot]:
            self._evictable.setdefault(slot)
        else:
            self._evictable.pop(slot, None)
            self._free.append(slot)


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
