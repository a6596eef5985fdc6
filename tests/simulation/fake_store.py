"""A disk store in memory that writes at once, keeps everything, and reads when it is told to."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore.disk.catalog import CatalogExtent, Reservation
from kvstore.disk.reader import Deliver, Ticket
from kvstore.disk.store import DiskStore
from kvstore.disk.types import Buffer, DiskCounters, DiskStats, Entry, EntryHead, ReadRun
from kvstore.ops import Parts
from kvstore.tokens import Digest


@dataclass(eq=False, slots=True)
class FakeTicket(Ticket):
    names: tuple[Digest, ...]
    deliver_found: Deliver
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


def head_of(entry: Entry) -> EntryHead:
    return EntryHead(entry.block_hash, entry.n_tokens, entry.sizes)


def reserved_parts(head: EntryHead, parts: Sequence[Buffer | None]) -> Parts:
    """Those for which room was reserved."""
    pairs = zip(parts, head.sizes, strict=True)
    return tuple(None if part is None or size is None else bytes(part) for part, size in pairs)


@dataclass(slots=True)
class FakeStore(DiskStore):
    """`longest_path` is in bytes."""

    records: dict[Digest, Stored] = field(default_factory=dict)
    reserved: list[Reservation] = field(default_factory=list)
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
        reserved = {head.block_hash for _, head in self.reserved}
        there = reserved.union(self.records)
        return next((i for i, name in enumerate(names) if name not in there), len(names))

    def roots(self) -> frozenset[Digest]:
        return frozenset(stored.root for stored in self.records.values())

    def entry(self, name: Digest) -> EntryHead | None:
        stored = self.records.get(name)
        return head_of(stored.entry) if stored else None

    def held_entry(self, name: Digest) -> EntryHead | None:
        reserved = (head for _, head in self.reserved if head.block_hash == name)
        return FakeStore.entry(self, name) or next(reserved, None)

    def lengths_below(self, name: Digest) -> frozenset[int]:
        return frozenset(s.entry.n_tokens for s in self.records.values() if s.parent == name)

    def path_room(self, name: Digest) -> int:
        return self.longest_path - self._path_bytes(name)

    def reserve(self, root: Digest, parent: Digest, head: EntryHead) -> Reservation | None:
        is_held = FakeStore.held_entry(self, head.block_hash) is not None
        if is_held or head.n_bytes > self.room or parent not in self._places(root):
            return None
        reservation = Reservation(CatalogExtent(root, parent, hashes=[head.block_hash]), head)
        self.reserved.append(reservation)
        self.room -= head.n_bytes
        return reservation

    def write(self, reservation: Reservation, parts: Sequence[Buffer | None]) -> bool:
        (extent, head), name = reservation, reservation.head.block_hash
        self.room += head.n_bytes
        if extent.is_removed:
            return False
        self.reserved.remove(reservation)
        entry = Entry(name, head.n_tokens, reserved_parts(head, parts))
        self.records[name] = Stored(extent.root, extent.parent, entry)
        self.n_written += head.n_bytes
        return True

    def cancel(self, reservation: Reservation) -> None:
        self.room += reservation.head.n_bytes
        self._remove(reservation)

    def read(self, names: Sequence[Digest], deliver: Deliver) -> FakeTicket:
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
        ticket.deliver_found(run)

    def touch(self, names: Sequence[Digest]) -> None:
        """Nothing grows old here."""

    def forget(self, name: Digest) -> None:
        doomed = [name] if name in self.records else []
        for each in doomed:
            doomed += [n for n, stored in self.records.items() if stored.parent == each]
            for reservation in [it for it in self.reserved if it.extent.parent == each]:
                self._remove(reservation)
        for each in doomed:
            self.records.pop(each, None)

    def clear(self, root: Digest | None = None) -> None:
        for reservation in [it for it in self.reserved if root in (None, it.extent.root)]:
            self._remove(reservation)
        kept = {n: s for n, s in self.records.items() if root not in (None, s.root)}
        self.records = kept

    def flush(self, timeout: float | None = None) -> bool:
        return True

    def close(self) -> None:
        self.tickets.clear()

    def stats(self) -> DiskStats:
        counters = DiskCounters(read_bytes=self.n_read, written_bytes=self.n_written)
        return DiskStats(counters, len(self.records), 0, 0, 0, self.read_rate)

    def _places(self, root: Digest) -> set[Digest]:
        """What an entry of the namespace may have as its parent."""
        stored = {name for name, it in self.records.items() if it.root == root}
        return {root, *stored, *(it.block_hash for of, it in self.reserved if of.root == root)}

    def _path_bytes(self, name: Digest) -> int:
        for extent, head in self.reserved:
            if head.block_hash == name and name not in self.records:
                return head.n_bytes + self._path_bytes(extent.parent)
        stored = self.records.get(name)
        return stored.entry.n_bytes + self._path_bytes(stored.parent) if stored else 0

    def _remove(self, reservation: Reservation) -> None:
        """With what hangs from it."""
        if reservation.extent.is_removed:
            return
        reservation.extent.is_removed = True
        self.reserved.remove(reservation)
        name = reservation.head.block_hash
        for below in [it for it in self.reserved if it.extent.parent == name]:
            self._remove(below)
