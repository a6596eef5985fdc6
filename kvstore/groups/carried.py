"""The slots of one group: held by leases, carried by blocks, evicted least recently used first."""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from kvstore.groups.group import GroupStats
from kvstore.types import BlockId, SlotId

_NOTHING: Mapping[int, SlotId] = MappingProxyType({})


class CarriedSlots:
    """`n_slots` slots of a group's storage.

    A slot is *held* by each lease that computes with it, and *carried* by blocks, each at a number
    of tokens: how many of the block's tokens the slot accounts for. It is free when neither is so,
    and can be evicted when it is only carried.
    """

    def __init__(self, n_slots: int) -> None:
        if n_slots < 1:
            raise ValueError(f"a group needs at least one slot, not {n_slots}")
        self._holders = [0] * n_slots
        self._carriers: list[set[tuple[BlockId, int]]] = [set() for _ in range(n_slots)]
        self._carried: dict[BlockId, dict[int, SlotId]] = {}
        self._free = [SlotId(slot) for slot in reversed(range(n_slots))]
        self._idle: dict[SlotId, None] = {}  # carried only, the least recently used first
        self._when_carried: list[Callable[[BlockId], None]] = []
        self._n_listed = 0  # slots held, once for each lease
        self.evictions = 0
        self.unresumable_tokens = 0  # counted by the group

    def when_carried(self, tell: Callable[[BlockId], None]) -> None:
        """Call `tell` with each block that carries one more from then on."""
        self._when_carried.append(tell)

    @property
    def n_slots(self) -> int:
        return len(self._holders)

    @property
    def n_free(self) -> int:
        return len(self._free)

    @property
    def n_cached(self) -> int:
        """Slots that are only carried: what eviction can free."""
        return len(self._idle)

    @property
    def n_held(self) -> int:
        return self.n_slots - self.n_free - self.n_cached

    @property
    def n_saved(self) -> int:
        """Slots that there would be besides if no lease shared any: a copy for each holder."""
        return self._n_listed - self.n_held

    def holders(self, slot: SlotId) -> int:
        return self._holders[slot]

    def carried_by(self, block: BlockId) -> Mapping[int, SlotId]:
        """The slots that a block carries, by number of tokens."""
        return self._carried.get(block, _NOTHING)

    def allocate(self) -> SlotId | None:
        """A free slot, held once; the least recently used one if none is free; None if all are
        held."""
        if not self._free:
            if not self._idle:
                return None
            self._evict(next(iter(self._idle)))
        slot = self._free.pop()
        self._holders[slot] = 1
        self._n_listed += 1
        return slot

    def hold(self, slot: SlotId) -> None:
        """One more lease holds the slot. Raises ValueError for a free one."""
        if self._holders[slot] == 0:
            if slot not in self._idle:
                raise ValueError(f"slot {slot} is free and cannot be held")
            del self._idle[slot]
        self._holders[slot] += 1
        self._n_listed += 1

    def drop(self, slot: SlotId) -> None:
        """One lease less holds the slot. Raises ValueError when none did."""
        if self._holders[slot] == 0:
            raise ValueError(f"slot {slot} is held by no lease")
        self._holders[slot] -= 1
        self._n_listed -= 1
        self._settle(slot)

    def touch(self, slot: SlotId) -> None:
        """It was of use: the most recently used now."""
        if slot in self._idle:
            del self._idle[slot]
            self._idle[slot] = None

    def carry(self, block: BlockId, n_tokens: int, slot: SlotId) -> None:
        """Let the block carry a held or carried slot, unless it carries one at `n_tokens`."""
        carried = self._carried.setdefault(block, {})
        if n_tokens not in carried:
            carried[n_tokens] = slot
            self._carriers[slot].add((block, n_tokens))
            for tell in self._when_carried:
                tell(block)

    def leave(self, block: BlockId, n_tokens: int) -> SlotId | None:
        """A slot that the block carries from now on, and nobody holds; None: all are held."""
        assert n_tokens not in self.carried_by(block), "the block carries one already"
        slot = self.allocate()
        if slot is not None:
            self.carry(block, n_tokens, slot)
            self.drop(slot)
        return slot

    def copy(self, source: BlockId, target: BlockId, n_tokens: int) -> None:
        """Let `target`, which begins with the same `n_tokens` tokens, carry what `source` does."""
        for count, slot in tuple(self.carried_by(source).items()):
            if count <= n_tokens:
                self.carry(target, count, slot)

    def forget(self, block: BlockId) -> None:
        """The block is gone, and carries nothing any more."""
        for n_tokens, slot in self._carried.pop(block, {}).items():
            self._carriers[slot].discard((block, n_tokens))
            self._settle(slot)

    def uncarry(self, slot: SlotId) -> None:
        """No block carries the slot any more: it does not hold what it should."""
        if not self._carriers[slot]:
            return
        for block, n_tokens in self._carriers[slot]:
            del self._carried[block][n_tokens]
            if not self._carried[block]:
                del self._carried[block]
        self._carriers[slot].clear()
        self._settle(slot)

    def stats(self, name: str) -> GroupStats:
        return GroupStats(
            name=name,
            total=self.n_slots,
            free=self.n_free,
            cached=self.n_cached,
            held=self.n_held,
            saved=self.n_saved,
            evictions=self.evictions,
            unresumable_tokens=self.unresumable_tokens,
        )

    def problems(self, holders: Mapping[SlotId, int]) -> Iterator[str]:
        """What does not add up, given how many leases hold each slot."""
        free, idle = set(self._free), set(self._idle)
        if len(free) != len(self._free):
            yield "a slot stands in the free list twice"
        for slot in map(SlotId, range(self.n_slots)):
            carriers = self._carriers[slot]
            if self._holders[slot] != holders.get(slot, 0):
                yield f"slot {slot}: {self._holders[slot]} holders, {holders.get(slot, 0)} leases"
            unheld = self._holders[slot] == 0
            expected = unheld and not carriers, unheld and bool(carriers)
            if (slot in free, slot in idle) != expected:
                yield f"slot {slot}: free, cached is {(slot in free, slot in idle)}, not {expected}"
            for block, n_tokens in carriers:
                if self._carried.get(block, {}).get(n_tokens) != slot:
                    yield f"slot {slot}: block {block} does not carry it at {n_tokens} tokens"
        saved = sum(count - 1 for count in holders.values())
        if self.n_saved != saved:
            yield f"{self.n_saved} slots saved, recounted {saved}"
        carried = sum(map(len, self._carried.values()))
        if carried != sum(map(len, self._carriers)):
            yield f"blocks carry {carried} slots, which have other carriers"

    def blocks(self) -> frozenset[BlockId]:
        """The blocks that carry anything."""
        return frozenset(self._carried)

    def _evict(self, slot: SlotId) -> None:
        self.evictions += 1
        self.uncarry(slot)

    def _settle(self, slot: SlotId) -> None:
        """To where its references put it: held, cached or free."""
        if self._holders[slot]:
            return
        if self._carriers[slot]:
            self._idle.setdefault(slot)
        else:
            self._idle.pop(slot, None)
            self._free.append(slot)
