"""A tier in memory with everything that a disk can do to its owner, one seed deciding all.

It writes late or not at all, reads slowly, loses and damages what it has, and goes on doing so
between any two questions, as other threads would.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from engine.disk_cache.tier import Found
from kvstore.disk.types import (
    DiskCounters,
    DiskStats,
    Entry,
    EntryInfo,
    Extent,
    Fault,
    ReadFailure,
    ReadRun,
)
from kvstore.tokens import Digest
from tests.simulation.census import Census, Happening
from tests.simulation.checks.records import RecordCheck
from tests.simulation.fake_tier import FakeTicket, Stored, completed


@dataclass(frozen=True, slots=True)
class Temper:
    """How often what goes wrong, each time that there is an occasion."""

    loss: float = 0.0  # a record and all below it go, as when a segment makes room
    damage: float = 0.0  # a record turns out to be wrong when it is read
    misfit: float = 0.0  # a record has other sizes than this engine's
    write: float = 1.0  # the writer writes what is next
    write_fault: float = 0.0  # and fails
    refusal: float = 0.0  # the tier takes nothing, as when the day's budget is spent
    reading: float = 0.6  # a reader delivers
    meanwhile: float = 0.0  # other threads go on between two questions
    buffer_bytes: int = 1 << 20
    read_ahead_bytes: int = 1 << 20
    read_rate: float | None = None
    longest_path: int = 1 << 30

    @classmethod
    def draw(cls, random: Random) -> "Temper":
        if random.random() < 0.3:
            return cls()
        return cls(
            loss=random.choice([0.0, 0.02, 0.05]),
            damage=random.choice([0.0, 0.05, 0.3]),
            misfit=random.choice([0.0, 0.1, 0.3]),
            write=random.choice([0.2, 1.0]),
            write_fault=random.choice([0.0, 0.0, 0.05]),
            refusal=random.choice([0.0, 0.1, 0.5]),
            reading=random.choice([0.02, 0.1, 0.4, 0.9]),
            meanwhile=random.choice([0.0, 0.01, 0.1]),
            buffer_bytes=random.choice([300, 1000, 1 << 20]),
            read_ahead_bytes=random.choice([1, 1, 100]),
            read_rate=random.choice([None, 1e3, 1e9]),
            longest_path=random.choice([200, 1000, 1 << 30, 1 << 30]),
        )


HEALTHY = Temper()


@dataclass(slots=True)
class TroubledTier:
    """`tick` lets time pass. Outlives the engines that use it, one after another."""

    random: Random
    temper: Temper
    check: RecordCheck
    census: Census
    records: dict[Digest, Stored] = field(default_factory=dict)
    tickets: list[FakeTicket] = field(default_factory=list)
    lost: set[Digest] = field(default_factory=set)  # ever, though it may be back
    _children: defaultdict[Digest, set[Digest]] = field(default_factory=lambda: defaultdict(set))
    _buffer: deque[Extent] = field(default_factory=deque)
    _buffered: Counter[Digest] = field(default_factory=Counter)
    _paths: dict[Digest, int] = field(default_factory=dict)  # of what is buffered, in bytes
    _refuses: bool = False

    @property
    def room(self) -> int:
        self._meanwhile()
        waiting = sum(extent.n_bytes for extent in self._buffer)
        return 0 if self._refuses else max(self.temper.buffer_bytes - waiting, 0)

    @property
    def is_idle(self) -> bool:
        self._meanwhile()
        return not self._buffer

    @property
    def read_rate(self) -> float | None:
        return self.temper.read_rate

    def known(self, names: Sequence[Digest]) -> int:
        self._meanwhile()
        return next((i for i, name in enumerate(names) if name not in self.records), len(names))

    def held(self, names: Sequence[Digest]) -> int:
        self._meanwhile()
        return next((i for i, name in enumerate(names) if not self.holds(name)), len(names))

    def holds(self, name: Digest) -> bool:
        """Whether it is stored or on its way."""
        return name in self.records or name in self._buffered

    def roots(self) -> frozenset[Digest]:
        self._meanwhile()
        return self.held_roots()

    def held_roots(self) -> frozenset[Digest]:
        """Of all that is stored or on its way."""
        waiting = {extent.root for extent in self._buffer}
        return frozenset(waiting.union(stored.root for stored in self.records.values()))

    def entry(self, name: Digest) -> EntryInfo | None:
        self._meanwhile()
        stored = self.records.get(name)
        return stored.info if stored else None

    def lacks(self, name: Digest, has: Sequence[bool]) -> bool:
        self._meanwhile()
        return self.misses(name, has)

    def misses(self, name: Digest, has: Sequence[bool]) -> bool:
        """Whether one of these parts is neither stored nor on its way."""
        stored = self.records.get(name)
        found = [stored.entry] if stored else []
        found += [it for extent in self._buffer for it in extent.entries if it.block_hash == name]
        return any(here and not any(it.has[n] for it in found) for n, here in enumerate(has))

    def lengths_below(self, name: Digest) -> frozenset[int]:
        self._meanwhile()
        below = self._children.get(name, ())
        return frozenset(self.records[child].entry.n_tokens for child in below)

    def path_room(self, name: Digest) -> int:
        self._meanwhile()
        return max(0, self.temper.longest_path - self.path_bytes(name))

    def path_bytes(self, name: Digest) -> int:
        """Of an entry, stored or on its way, and of all that it hangs from."""
        if name in self._paths:
            return self._paths[name]
        stored = self.records.get(name)
        return self.path_bytes(stored.parent) + stored.entry.n_bytes if stored else 0

    def path(self, name: Digest) -> Iterator[tuple[Digest, Entry]]:
        """The entries from this one up to its root, stored or on their way."""
        buffered = {
            entry.block_hash: (parent, entry)
            for extent in self._buffer
            for parent, entry in extent.with_parents()
        }
        while True:
            if (stored := self.records.get(name)) is not None:
                parent, entry = stored.parent, stored.entry
            elif name in buffered:
                parent, entry = buffered[name]
            else:
                return
            yield name, entry
            name = parent

    def offer(self, extent: Extent) -> bool:
        path_bytes = self.path_bytes(extent.parent)
        is_short = path_bytes + extent.n_bytes <= self.temper.longest_path
        if extent.n_bytes > self.room or not is_short or not self._has_place(extent):
            self.census[Happening.OFFER_REFUSED] += 1
            return False
        for parent, entry in extent.with_parents():
            self.check(extent.root, parent, entry)
            path_bytes += entry.n_bytes
            self._paths[entry.block_hash] = path_bytes
        self._buffer.append(extent)
        self._buffered.update(entry.block_hash for entry in extent.entries)
        return True

    def read(self, names: Sequence[Digest], deliver: Callable[[Found], None]) -> FakeTicket:
        assert names, "a reading of nothing"
        ticket = FakeTicket(tuple(names), deliver)
        self.tickets.append(ticket)
        self.census[Happening.LOAD_BEGUN] += 1
        self._meanwhile()
        return ticket

    def touch(self, names: Sequence[Digest]) -> None:
        """Nothing grows old here."""

    def forget(self, name: Digest) -> None:
        doomed = [name] if name in self.records else []
        for each in doomed:
            doomed += self._children.pop(each, ())
        for each in doomed:
            self._children[self.records.pop(each).parent].discard(each)
        self.lost.update(doomed)
        self.census[Happening.ENTRY_FORGOTTEN] += len(doomed)

    def clear(self, root: Digest | None = None) -> None:
        self._drop([extent for extent in self._buffer if root in (None, extent.root)])
        for name in [n for n, s in self.records.items() if root in (None, s.root)]:
            self.forget(name)

    def flush(self, timeout: float | None = None) -> bool:
        while self._buffer and (timeout is None or self.random.random() * timeout > 0.1):
            self._write()
        return not self._buffer

    def close(self) -> None:
        """What has not been flushed is dropped; the next engine finds the rest."""
        self._drop(list(self._buffer))
        self.tickets.clear()

    def stats(self) -> DiskStats:
        """Nothing: it would have moved on before anybody looks."""
        return DiskStats(DiskCounters(), 0, 0, 0, 0, None)

    def tick(self) -> None:
        temper, random = self.temper, self.random
        if self.records and random.random() < temper.loss:
            self.forget(random.choice(list(self.records)))
        self._refuses = random.random() < temper.refusal
        if self._buffer and random.random() < temper.write:
            self._write()
        for ticket in self.tickets:
            if random.random() < temper.reading:
                self._advance(ticket)
        self.tickets = [ticket for ticket in self.tickets if not ticket.is_over]

    def problems(self) -> Iterator[str]:
        for name, stored in self.records.items():
            if stored.parent != stored.root and stored.parent not in self.records:
                yield f"{name.hex()} is an orphan"

    def _meanwhile(self) -> None:
        if self.temper.meanwhile and self.random.random() < self.temper.meanwhile:
            self.tick()

    def _has_place(self, extent: Extent) -> bool:
        if extent.parent == extent.root or extent.parent in self._buffered:
            return True
        parent = self.records.get(extent.parent)
        return parent is not None and parent.root == extent.root

    def _write(self) -> None:
        """As the catalog: what has no parent any more is no use, and what is there is added to."""
        extent = self._buffer[0]
        if self.random.random() < self.temper.write_fault:
            self._drop([extent])
            return
        for parent, entry in extent.with_parents():
            if parent != extent.root and parent not in self.records:
                self._lose(entry.block_hash)
                continue
            if (before := self.records.get(entry.block_hash)) is not None:
                self.census[Happening.PARTS_ADDED] += before.lacks(entry.has)
            whole = entry if before is None else completed(entry, before.entry)
            self.records[entry.block_hash] = Stored(extent.root, parent, whole)
            self._children[parent].add(entry.block_hash)
            self.census[Happening.RECORD_WRITTEN] += 1
        self._let_go([extent])

    def _drop(self, extents: Sequence[Extent]) -> None:
        for entry in (entry for extent in extents for entry in extent.entries):
            self._lose(entry.block_hash)
        self._let_go(extents)

    def _lose(self, name: Digest) -> None:
        self.lost.add(name)
        self.census[Happening.WRITE_LOST] += 1

    def _let_go(self, extents: Sequence[Extent]) -> None:
        for extent in extents:
            self._buffer.remove(extent)
            self._buffered -= Counter(entry.block_hash for entry in extent.entries)
            for entry in extent.entries:
                if entry.block_hash not in self._buffered:
                    self._paths.pop(entry.block_hash, None)

    def _advance(self, ticket: FakeTicket) -> None:
        """The next run, as long as it is not too far ahead of who consumes it."""
        if ticket.is_over:
            return
        if ticket.ahead_bytes >= min(self.temper.read_ahead_bytes, ticket.most_ahead_bytes):
            self.census[Happening.READER_ASIDE] += 1
            return
        found = self._found(ticket.names[ticket.done : ticket.done + self.random.randint(1, 4)])
        if not found:
            ticket.is_over = True
            ticket.deliver(ReadFailure(ticket.done, Fault.CHECKSUM))
            return
        run = ReadRun(ticket.done, tuple(found))
        ticket.done += len(found)
        ticket.ahead_bytes += run.n_bytes
        ticket.is_over = ticket.done == len(ticket.names)
        ticket.deliver(run)

    def _found(self, names: Sequence[Digest]) -> list[Entry]:
        """Up to the first that has gone or is damaged."""
        found = list[Entry]()
        for name in names:
            stored = self.records.get(name)
            if stored is None:
                break
            if self.random.random() < self.temper.damage:
                self.census[Happening.ENTRY_DAMAGED] += 1
                self.forget(name)
                break
            if self.random.random() < self.temper.misfit:
                self.census[Happening.ENTRY_MISFIT] += 1
                found.append(_misfit(stored.entry))
                break
            found.append(stored.entry)
        return found


def _misfit(entry: Entry) -> Entry:
    """As if another engine had written it."""
    return replace(entry, parts=tuple(part and bytes(part)[:-8] for part in entry.parts))
