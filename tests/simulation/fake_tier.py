"""A tier in memory that is slow, forgets, and has less room than one would like."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

from engine.disk_cache.tier import Found
from kvstore.digest import Digest
from kvstore.tier.tally import TierCounters
from kvstore.tier.tier import TierStats
from kvstore.tier.types import Entry, EntryInfo, Extent, Fault, ReadFailure, ReadRun


@dataclass(eq=False, slots=True)
class FakeTicket:
    names: tuple[Digest, ...]
    deliver: Callable[[Found], None]
    done: int = 0
    is_over: bool = False
    ahead_bytes: int = 0

    def cancel(self) -> None:
        self.is_over = True

    def consumed(self, n_bytes: int) -> None:
        self.ahead_bytes -= n_bytes
        assert self.ahead_bytes >= 0, "more was consumed than was delivered"


@dataclass(slots=True)
class Stored:
    root: Digest
    parent: Digest
    entry: Entry


@dataclass(slots=True)
class FakeTier:
    """`tick` lets time pass: readers deliver, and things get lost."""

    random: Random
    loss_rate: float = 0.0
    damage_rate: float = 0.0
    records: dict[Digest, Stored] = field(default_factory=dict)
    tickets: list[FakeTicket] = field(default_factory=list)
    room: int = 1 << 20
    is_idle: bool = True
    read_rate: float | None = None
    n_read: int = 0
    n_written: int = 0

    def known(self, names: Sequence[Digest]) -> int:
        return next((i for i, name in enumerate(names) if name not in self.records), len(names))

    def held(self, names: Sequence[Digest]) -> int:
        return self.known(names)

    def entry(self, name: Digest) -> EntryInfo | None:
        stored = self.records.get(name)
        if stored is None:
            return None
        return EntryInfo(stored.entry.n_tokens, stored.entry.part_bytes, stored.entry.n_bytes, 0.0)

    def lengths_below(self, name: Digest) -> frozenset[int]:
        return frozenset(s.entry.n_tokens for s in self.records.values() if s.parent == name)

    def path_room(self, name: Digest) -> int:
        return 1 << 20

    def offer(self, extent: Extent) -> bool:
        if extent.n_bytes > self.room:
            return False
        parent = self.records.get(extent.parent)
        if extent.parent != extent.root and (parent is None or parent.root != extent.root):
            return False
        for above, entry in extent.with_parents():
            self.records[entry.name] = Stored(extent.root, above, entry)
            self.n_written += entry.n_bytes
        return True

    def read(self, names: Sequence[Digest], deliver: Callable[[Found], None]) -> FakeTicket:
        ticket = FakeTicket(tuple(names), deliver)
        self.tickets.append(ticket)
        return ticket

    def touch(self, names: Sequence[Digest]) -> None:
        """Nothing grows old here."""

    def forget(self, name: Digest) -> None:
        doomed = [name] if name in self.records else []
        for each in doomed:
            doomed += [n for n, stored in self.records.items() if stored.parent == each]
        for each in doomed:
            self.records.pop(each, None)

    def clear(self, root: Digest | None = None) -> None:
        kept = {n: s for n, s in self.records.items() if root not in (None, s.root)}
        self.records = kept

    def flush(self, timeout: float | None = None) -> bool:
        return True

    def close(self) -> None:
        self.tickets.clear()

    def stats(self) -> TierStats:
        counters = TierCounters(read_bytes=self.n_read, written_bytes=self.n_written)
        return TierStats(counters, len(self.records), 0, 0, self.read_rate)

    def tick(self) -> None:
        if self.records and self.random.random() < self.loss_rate:
            self.forget(self.random.choice(list(self.records)))
        self.room = self.random.choice([0, 300, 1 << 20, 1 << 20])
        for ticket in self.tickets:
            if self.random.random() < 0.6:
                self._advance(ticket)
        self.tickets = [ticket for ticket in self.tickets if not ticket.is_over]

    def problems(self) -> Iterator[str]:
        for name, stored in self.records.items():
            parent = self.records.get(stored.parent)
            if stored.parent != stored.root and parent is None:
                yield f"{name.hex()} is an orphan"

    def _advance(self, ticket: FakeTicket) -> None:
        if ticket.is_over:
            return
        wanted = ticket.names[ticket.done : ticket.done + self.random.randint(1, 4)]
        found = [self.records[name].entry for name in wanted[: self.known(wanted)]]
        if self.random.random() < self.damage_rate:
            found = []
            self.forget(wanted[0])
        if not found:
            ticket.is_over = True
            ticket.deliver(ReadFailure(ticket.done, Fault.CHECKSUM))
            return
        run = ReadRun(ticket.done, tuple(found))
        ticket.done += len(found)
        ticket.ahead_bytes += run.n_bytes
        self.n_read += run.n_bytes
        ticket.is_over = ticket.done == len(ticket.names)
        ticket.deliver(run)
