"""The threads that read: for each ticket a run of consecutive entries at a time, checked.

Tickets take turns, a run each. One whose runs are not consumed stands aside until they are.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

from kvstore.tier.catalog import Catalog
from kvstore.tier.disk.segments import Segments
from kvstore.tier.record import Record
from kvstore.tier.tally import Tally
from kvstore.tier.types import Entry, Fault, ReadFailure, ReadRun, TierLimits, fault_of
from kvstore.tokens import Digest

logger = logging.getLogger(__name__)

Deliver = Callable[[ReadRun | ReadFailure], None]
"""Called by a reader thread, or by who asks where none is left; it must not wait."""

Forget = Callable[[Record], None]
"""A record whose bytes are not what they should be, to be forgotten with all below it."""

READERS = 2
MOST_ENTRIES = 256
"""Of a run, however small they are."""


class Ticket:
    """A reading under way."""

    def __init__(
        self,
        hashes: Sequence[Digest],
        deliver: Deliver,
        resume: Callable[["Ticket"], None],
        now: float,
        most_ahead_bytes: int,
    ) -> None:
        self.hashes = tuple(hashes)
        self.now = now
        self._deliver = deliver
        self._resume = resume
        self._lock = threading.RLock()
        self._next = 0
        self._ahead_bytes = 0
        self._most_ahead_bytes = most_ahead_bytes
        self._is_aside = False
        self._is_over = False

    def cancel(self) -> None:
        """Stop: nothing more is delivered once this has returned."""
        with self._lock:
            self._is_over = True

    def consumed(self, n_bytes: int) -> None:
        """So many bytes of what was delivered are not held any more: as many may be read."""
        with self._lock:
            self._ahead_bytes -= n_bytes
            self._go_on()

    def keep_ahead(self, n_bytes: int) -> None:
        """No more than so many bytes are read and not consumed, but for the last run; 0: none."""
        with self._lock:
            self._most_ahead_bytes = n_bytes
            self._go_on()

    def turn(self) -> int | None:
        """Where to read on; None when it is over or stands aside."""
        with self._lock:
            if self._is_over:
                return None
            if self._ahead_bytes >= self._most_ahead_bytes:
                self._is_aside = True
                return None
            return self._next

    def fail(self, fault: Fault) -> None:
        """Nothing more of it can be had."""
        with self._lock:
            self.deliver(ReadFailure(self._next, fault))

    def deliver(self, found: ReadRun | ReadFailure) -> bool:
        """Whether there is more to come."""
        with self._lock:
            if self._is_over:
                return False
            if isinstance(found, ReadRun):
                self._next += len(found.entries)
                self._ahead_bytes += found.n_bytes
            self._is_over = isinstance(found, ReadFailure) or self._next >= len(self.hashes)
            try:
                self._deliver(found)
            except Exception:
                logger.exception("A reading of the disk cache was not taken, and is given up")
                self._is_over = True
            return not self._is_over

    def _go_on(self) -> None:
        if self._is_aside and self._ahead_bytes < self._most_ahead_bytes:
            self._is_aside = False
            self._resume(self)


class Readers:
    """See the module."""

    def __init__(
        self,
        catalog: Catalog,
        segments: Segments,
        limits: TierLimits,
        tally: Tally,
        forget: Forget,
    ) -> None:
        self._catalog = catalog
        self._segments = segments
        self._limits = limits
        self._tally = tally
        self._forget = forget
        self._tickets = queue.SimpleQueue[Ticket | None]()
        self._threads = [
            threading.Thread(target=self._run, name=f"tier-reader-{number}", daemon=True)
            for number in range(READERS)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def read(self, hashes: Sequence[Digest], deliver: Deliver, now: float) -> Ticket:
        ahead_bytes = self._limits.read_ahead_bytes
        ticket = Ticket(hashes, deliver, self._tickets.put, now, ahead_bytes)
        if len(self.ended) == len(self._threads):
            ticket.fail(Fault.INTERNAL)
        elif hashes:
            self._tickets.put(ticket)
        return ticket

    @property
    def ended(self) -> tuple[str, ...]:
        """The names of threads that do not run."""
        return tuple(thread.name for thread in self._threads if not thread.is_alive())

    def close(self) -> None:
        """Runs that are being read are delivered; nothing else is."""
        for _ in self._threads:
            self._tickets.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (ticket := self._tickets.get()) is not None:
            try:
                self._take_turn(ticket)
            except Exception:  # whatever it is, others read on
                logger.exception("a reading of the disk cache failed")
                self._tally.fault(Fault.INTERNAL)
                ticket.fail(Fault.INTERNAL)

    def _take_turn(self, ticket: Ticket) -> None:
        start = ticket.turn()
        if start is not None and ticket.deliver(self._read(ticket, start)):
            self._tickets.put(ticket)

    def _read(self, ticket: Ticket, start: int) -> ReadRun | ReadFailure:
        records = self._next_run(ticket.hashes, start)
        if not records:
            return ReadFailure(start, Fault.GONE)
        n_bytes, began = sum(record.n_bytes for record in records), time.perf_counter()
        try:
            found = self._segments.read(records[0].segment, records[0].offset, n_bytes)
            entries = _cut(records, found)
        except OSError as error:
            return self._failure(start, records[0], fault_of(error))
        except MemoryError:
            return self._failure(start, records[0], Fault.RESOURCES)
        self._tally.timed(n_bytes, time.perf_counter() - began)
        if not entries:
            is_short = len(found) < records[0].n_bytes
            fault = Fault.SHORT_READ if is_short else Fault.CHECKSUM
            return self._failure(start, records[0], fault)
        self._tally.count(read_entries=len(entries), read_bytes=n_bytes)
        self._catalog.touch(entries[-1].block_hash, ticket.now)
        segment = records[0].segment
        self._segments.stamp(segment, self._catalog.last_used(segment))
        return ReadRun(start, tuple(entries))

    def _next_run(self, hashes: Sequence[Digest], start: int) -> list[Record]:
        """Records of the next hashes, as long as they are adjacent in one segment."""
        run, n_bytes = list[Record](), 0
        for block_hash in hashes[start : start + MOST_ENTRIES]:
            record = self._catalog.get(block_hash)
            if record is None:
                break
            n_bytes += record.n_bytes
            if run and (
                (record.segment, record.offset) != (run[-1].segment, run[-1].end)
                or n_bytes > self._limits.run_bytes
            ):
                break
            run.append(record)
        return run

    def _failure(self, start: int, record: Record, fault: Fault) -> ReadFailure:
        if self._catalog.get(record.block_hash) is not record:
            return ReadFailure(start, Fault.GONE)
        if fault is Fault.MISSING:  # another process has evicted its segment
            self._forget(record)
            return ReadFailure(start, Fault.GONE)
        self._tally.fault(fault)
        if fault is not Fault.RESOURCES:
            self._forget(record)
        return ReadFailure(start, fault)


def _cut(records: Sequence[Record], found: memoryview) -> list[Entry]:
    """The entries up to the first that is not what it should be."""
    entries, offset = list[Entry](), 0
    for record in records:
        entry = record.cut(found[offset : offset + record.n_bytes])
        if entry is None:
            break
        entries.append(entry)
        offset += record.n_bytes
    return entries
