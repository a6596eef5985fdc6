"""A tier in memory that writes at once, keeps everything, and reads when it is told to."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from engine.disk_cache.tier import Found
from kvstore.disk.types import DiskCounters, DiskStats, Entry, EntryInfo, Extent, ReadRun
from kvstore.tokens import Digest


@dataclass(eq=False, slots=True)
class FakeTicket:
    names: tuple[Digest, ...]
    deliver: Callable[[Found], None]
    done: int = 0
    is_over: bool = False
    ahead_bytes: int = 0
    most_ahead_bytes: int = 1 << 62

    def cancel(self) -> None:
        self.is_over = True

    def consumed(self, n_bytes: int) -> None:
        self.ahead_bytes -= n_bytes
        assert self.ahead_bytes >= 0, "more was consumed than was delivered"

    def keep_ahead(self, n_bytes: int) -> None:
        self.most_ahead_bytes = n_bytes


@dataclass(frozen=True, slots=True)
class Stored:
    root: Digest
    parent: Digest
    entry: Entry

    @property
    def info(self) -> EntryInfo:
        return EntryInfo(self.entry.n_tokens, self.entry.part_bytes)

    def lacks(self, has: Sequence[bool]) -> bool:
        return any(here and not there for here, there in zip(has, self.entry.has, strict=True))


def completed(entry: Entry, other: Entry) -> Entry:
    """It, with the parts that it lacks and another of the same hash has."""
    pairs = zip(entry.parts, other.parts, strict=True)
    return replace(entry, parts=tuple(theirs if mine is None else mine for mine, theirs in pairs))


@dataclass(slots=True)
class FakeTier:
    """`longest_path` is in bytes."""

    records: dict[Digest, Stored] = field(default_factory=dict)
    tickets: list[FakeTicket] = field(default_factory=list)
    room: int = 1 << 20
    longest_path: int = 1 << 20
    is_idle: bool = True
    read_rate: float | None = None
    n_read: int = 0
    n_written: int = 0

    def known(self, names: Sequence[Digest]) -> int:
        return next((i for i, name in enumerate(names) if name not in self.records), len(names))

    def held(self, names: Sequence[Digest]) -> int:
        return self.known(names)

    def lacks(self, name: Digest, has: Sequence[bool]) -> bool:
        stored = self.records.get(name)
        return stored is None or stored.lacks(has)

    def roots(self) -> frozenset[Digest]:
        return frozenset(stored.root for stored in self.records.values())

    def entry(self, name: Digest) -> EntryInfo | None:
        stored = self.records.get(name)
        return stored.info if stored else None

    def lengths_below(self, name: Digest) -> frozenset[int]:
        return frozenset(s.entry.n_tokens for s in self.records.values() if s.parent == name)

    def path_room(self, name: Digest) -> int:
        above = self.longest_path
        while (stored := self.records.get(name)) is not None:
            above -= stored.entry.n_bytes
            name = stored.parent
        return above

    def offer(self, extent: Extent) -> bool:
        if extent.n_bytes > self.room:
            return False
        parent = self.records.get(extent.parent)
        if extent.parent != extent.root and (parent is None or parent.root != extent.root):
            return False
        for above, entry in extent.with_parents():
            self.records[entry.block_hash] = Stored(extent.root, above, entry)
            self.n_written += entry.n_bytes
        return True

    def read(self, names: Sequence[Digest], deliver: Callable[[Found], None]) -> FakeTicket:
        ticket = FakeTicket(tuple(names), deliver)
        self.tickets.append(ticket)
        return ticket

    def hand_over(self, n_entries: int) -> None:
        """So many entries of the first reading that is not over."""
        self.hand_over_to(next(ticket for ticket in self.tickets if not ticket.is_over), n_entries)

    def hand_over_to(self, ticket: FakeTicket, n_entries: int) -> None:
        names = ticket.names[ticket.done : ticket.done + n_entries]
        run = ReadRun(ticket.done, tuple(self.records[name].entry for name in names))
        ticket.done += len(names)
        ticket.ahead_bytes += run.n_bytes
        ticket.is_over = ticket.done == len(ticket.names)
        self.n_read += run.n_bytes
        ticket.deliver(run)

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

    def stats(self) -> DiskStats:
        counters = DiskCounters(read_bytes=self.n_read, written_bytes=self.n_written)
        return DiskStats(counters, len(self.records), 0, 0, 0, self.read_rate)
