"""The slots of one group: used by leases, attached to blocks, evicted least recently used first."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from kvstore.groups.group import GroupStats
from kvstore.types import BlockId, Finding, SlotId

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
