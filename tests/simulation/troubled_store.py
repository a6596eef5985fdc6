"""A tier in memory with everything that a disk can do to its owner, one seed deciding all.

It writes late or not at all, reads slowly, loses and damages what it has, and goes on doing so
between any two questions, as other threads would.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from kvstore.disk.catalog import CatalogExtent, Reservation
from kvstore.disk.reader import Deliver
from kvstore.disk.store import DiskStore
from kvstore.disk.types import (
    Buffer,
    DiskCounters,
    DiskStats,
    Entry,
    EntryHead,
    Fault,
    ReadFailure,
    ReadRun,
)
from kvstore.tokens import Digest, later_digest
from tests.simulation.census import Census, Happening
from tests.simulation.checks.records import RecordCheck
from tests.simulation.fake_store import FakeTicket, Stored, head_of, reserved_parts


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


@dataclass(eq=False, slots=True)
class Pending:
    """What is reserved, and is written once it has its parts."""

    reservation: Reservation
    parts: tuple[Buffer | None, ...] | None = None

    @property
    def extent(self) -> CatalogExtent:
        return self.reservation.extent

    @property
    def name(self) -> Digest:
        return self.reservation.head.block_hash


@dataclass(slots=True)
class TroubledStore(DiskStore):
    """`tick` lets time pass. Outlives the engines that use it, one after another."""

    random: Random
    temper: Temper
    check: RecordCheck
    census: Census
    records: dict[Digest, Stored] = field(default_factory=dict)
    tickets: list[FakeTicket] = field(default_factory=list)
    lost: set[Digest] = field(default_factory=set)  # ever, though it may be back
    _children: defaultdict[Digest, set[Digest]] = field(default_factory=lambda: defaultdict(set))
    _pending: list[Pending] = field(default_factory=list)
    _reserved_bytes: int = 0
    _refuses: bool = False

    @property
    def room(self) -> int:
        self._meanwhile()
        return 0 if self._refuses else max(self.temper.buffer_bytes - self._reserved_bytes, 0)

    @property
    def is_idle(self) -> bool:
        self._meanwhile()
        return not self._reserved_bytes

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
        return self.held_head(name) is not None

    def roots(self) -> frozenset[Digest]:
        self._meanwhile()
        return self.held_roots()

    def held_roots(self) -> frozenset[Digest]:
        """Of all that is stored or on its way."""
        waiting = {each.extent.root for each in self._pending}
        return frozenset(waiting.union(stored.root for stored in self.records.values()))

    def entry(self, name: Digest) -> EntryHead | None:
        self._meanwhile()
        stored = self.records.get(name)
        return head_of(stored.entry) if stored else None

    def held_entry(self, name: Digest) -> EntryHead | None:
        self._meanwhile()
        return self.held_head(name)

    def held_head(self, name: Digest) -> EntryHead | None:
        """The record of an entry that is stored or on its way."""
        if (stored := self.records.get(name)) is not None:
            return head_of(stored.entry)
        return next((it.reservation.head for it in self._pending if it.name == name), None)

    def lengths_below(self, name: Digest) -> frozenset[int]:
        self._meanwhile()
        below = self._children.get(name, ())
        return frozenset(self.records[child].entry.n_tokens for child in below)

    def path_room(self, name: Digest) -> int:
        self._meanwhile()
        return max(0, self.temper.longest_path - self.path_bytes(name))

    def path_bytes(self, name: Digest) -> int:
        """Of an entry, stored or on its way, and of all that it hangs from."""
        return sum(head.n_bytes for head in self.path(name))

    def path(self, name: Digest) -> Iterator[EntryHead]:
        """The entries from this one up to its root, stored or on their way."""
        pending = {each.name: each for each in reversed(self._pending)}
        while True:
            if (stored := self.records.get(name)) is not None:
                yield head_of(stored.entry)
                name = stored.parent
            elif (each := pending.get(name)) is not None:
                yield each.reservation.head
                name = each.extent.parent
            else:
                return

    def reserve(self, root: Digest, parent: Digest, head: EntryHead) -> Reservation | None:
        room, is_held = self.room, self.holds(head.block_hash)
        path_room = self.temper.longest_path - self.path_bytes(parent)
        has_place = not is_held and self._has_place(root, parent)
        if not has_place or head.n_bytes > min(room, path_room):
            self.census[Happening.OFFER_REFUSED] += 1
            return None
        reservation = Reservation(CatalogExtent(root, parent, [head.block_hash]), head)
        self._pending.append(Pending(reservation))
        self._reserved_bytes += head.n_bytes
        return reservation

    def write(self, reservation: Reservation, parts: Sequence[Buffer | None]) -> bool:
        self._meanwhile()
        extent, head = reservation
        if extent.is_removed:
            self._reserved_bytes -= head.n_bytes
            return False
        pending = next(each for each in self._pending if each.reservation is reservation)
        pending.parts = reserved_parts(head, parts)
        entry = Entry(head.block_hash, head.n_tokens, pending.parts)
        self.check(extent.root, extent.parent, entry)
        return True

    def cancel(self, reservation: Reservation) -> None:
        self._reserved_bytes -= reservation.head.n_bytes
        self._remove([each for each in self._pending if each.reservation is reservation])

    def read(self, names: Sequence[Digest], deliver: Deliver) -> FakeTicket:
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
            self._remove([it for it in self._pending if each in (it.name, it.extent.parent)])
        for each in doomed:
            self._children[self.records.pop(each).parent].discard(each)
        self.lost.update(doomed)
        self.census[Happening.ENTRY_FORGOTTEN] += len(doomed)

    def clear(self, root: Digest | None = None) -> None:
        self._remove([each for each in self._pending if root in (None, each.extent.root)])
        for name in [n for n, s in self.records.items() if root in (None, s.root)]:
            self.forget(name)

    def flush(self, timeout: float | None = None) -> bool:
        while self._next() and (timeout is None or self.random.random() * timeout > 0.1):
            self._write()
        return self._next() is None

    def close(self) -> None:
        """What has not been flushed is dropped; the next engine finds the rest."""
        self._remove(list(self._pending))
        self._reserved_bytes = 0
        self.tickets.clear()

    def stats(self) -> DiskStats:
        """Nothing: it would have moved on before anybody looks."""
        return DiskStats(DiskCounters(), 0, 0, 0, 0, None)

    def tick(self) -> None:
        temper, random = self.temper, self.random
        if self.records and random.random() < temper.loss:
            self.forget(random.choice(list(self.records)))
        self._refuses = random.random() < temper.refusal
        if self._next() and random.random() < temper.write:
            self._write()
        for ticket in self.tickets:
            if random.random() < temper.reading:
                self._advance(ticket)
        self.tickets = [ticket for ticket in self.tickets if not ticket.is_over]

    def problems(self) -> Iterator[str]:
        for name, stored in self.records.items():
            if stored.parent != stored.root and stored.parent not in self.records:
                yield f"{name.hex()} is an orphan"
        for each in self._pending:
            if not self._has_place(each.extent.root, each.extent.parent):
                yield f"{each.name.hex()} is to be written, and would be an orphan"

    def _meanwhile(self) -> None:
        if self.temper.meanwhile and self.random.random() < self.temper.meanwhile:
            self.tick()

    def _has_place(self, root: Digest, parent: Digest) -> bool:
        if parent == root or any(
            (it.name, it.extent.root) == (parent, root) for it in self._pending
        ):
            return True
        stored = self.records.get(parent)
        return stored is not None and stored.root == root

    def unread(self) -> list[Reservation]:
        """What has been reserved, and is neither written nor given back."""
        return [each.reservation for each in self._pending if each.parts is None]

    def _next(self) -> Pending | None:
        """What is written next."""
        return next((each for each in self._pending if each.parts is not None), None)

    def _write(self) -> None:
        pending = self._next()
        assert pending is not None
        if self.random.random() < self.temper.write_fault:
            self._remove([pending])
            return
        (extent, head), parts = pending.reservation, pending.parts
        assert parts is not None
        assert extent.parent in (extent.root, *self.records), "written before its parent"
        entry = Entry(head.block_hash, head.n_tokens, parts)
        named = (later_digest(name) for name in self._children[extent.parent])
        self.census[Happening.PARTS_ADDED] += pending.name in set(named)
        self.records[pending.name] = Stored(extent.root, extent.parent, entry)
        self._children[extent.parent].add(pending.name)
        self.census[Happening.RECORD_WRITTEN] += 1
        self._pending.remove(pending)
        self._reserved_bytes -= head.n_bytes

    def _remove(self, pending: list[Pending]) -> None:
        """They, and what hangs from them, will not be written."""
        for each in pending:
            if each.extent.is_removed:
                continue
            each.extent.is_removed = True
            self._pending.remove(each)
            pending += [it for it in self._pending if each.name == it.extent.parent]
            if each.parts is not None:  # else whoever reserved it finds out
                self._reserved_bytes -= each.reservation.head.n_bytes
                self.lost.add(each.name)
                self.census[Happening.WRITE_LOST] += 1

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
            ticket.deliver_found(ReadFailure(ticket.done, Fault.CHECKSUM))
            return
        run = ReadRun(ticket.done, tuple(found))
        ticket.done += len(found)
        ticket.ahead_bytes += run.n_bytes
        ticket.is_over = ticket.done == len(ticket.names)
        ticket.deliver_found(run)

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
