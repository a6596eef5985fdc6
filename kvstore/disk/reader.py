"""The threads that read: for each ticket a run of consecutive entries at a time, verified.

Tickets take turns, a run each. One whose runs are not consumed is paused until they are.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

from kvstore.disk.catalog import Catalog, Record
from kvstore.disk.extent import parse
from kvstore.disk.space import Space
from kvstore.disk.types import (
    DiskCounters,
    DiskLimits,
    Entry,
    Fault,
    ReadFailure,
    ReadRun,
    fault_of,
)
from kvstore.tokens import Digest

logger = logging.getLogger(__name__)

Deliver = Callable[[ReadRun | ReadFailure], None]
"""Called by a reader thread, or by the thread that asks where none is left. It must not wait."""

READERS = 2
MOST_ENTRIES = 256
"""Of a run, however small they are."""

RATE_MEMORY_BYTES = 256 << 20
"""The observed rate counts about the last RATE_MEMORY_BYTES that were read."""


class Ticket:
    """A read that is under way."""

    def __init__(
        self,
        hashes: Sequence[Digest],
        deliver: Deliver,
        resume: Callable[["Ticket"], None],
        most_ahead_bytes: int,
    ) -> None:
        self.hashes = tuple(hashes)
        self._deliver = deliver
        self._resume = resume
        self._lock = threading.RLock()
        self._next = 0
        self._ahead_bytes = 0
        self._most_ahead_bytes = most_ahead_bytes
        self._is_paused = False
        self._is_over = False

    def cancel(self) -> None:
        """Stop: nothing more is delivered once this has returned."""
        with self._lock:
            self._is_over = True

    def consumed(self, n_bytes: int) -> None:
        """`n_bytes` of what was delivered are not held any more, so as many may be read."""
        with self._lock:
            self._ahead_bytes -= n_bytes
            self._unpause()

    def keep_ahead(self, n_bytes: int) -> None:
        """Read no more than `n_bytes` that are not consumed, except for the last run; 0: pause."""
        with self._lock:
            self._most_ahead_bytes = n_bytes
            self._unpause()

    def next_index(self) -> int | None:
        """The index of the next entry to read; None when the read is over or paused."""
        with self._lock:
            if self._is_over:
                return None
            if self._ahead_bytes >= self._most_ahead_bytes:
                self._is_paused = True
                return None
            return self._next

    def fail(self, fault: Fault) -> None:
        """End the read: no more entries can be delivered."""
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
                logger.exception("a read of the disk cache was not accepted and is given up")
                self._is_over = True
            return not self._is_over

    def _unpause(self) -> None:
        if self._is_paused and self._ahead_bytes < self._most_ahead_bytes:
            self._is_paused = False
            self._resume(self)


class _Unreadable(Exception):
    """An entry cannot be read, or is not what was written."""

    def __init__(self, record: Record, fault: Fault) -> None:
        self.record = record
        self.fault = fault


class Readers:
    """See the module."""

    def __init__(
        self,
        catalog: Catalog,
        space: Space,
        limits: DiskLimits,
        counters: DiskCounters,
    ) -> None:
        self._catalog = catalog
        self._space = space
        self._limits = limits
        self._counters = counters
        self._rate_bytes = self._rate_seconds = 0.0
        self._tickets = queue.SimpleQueue[Ticket | None]()
        self._threads = [
            threading.Thread(target=self._run, name=f"disk-reader-{number}", daemon=True)
            for number in range(READERS)
        ]

    @property
    def read_rate(self) -> float | None:
        """Bytes a second, recently; None before anything was read."""
        with self._counters.lock:
            return self._rate_bytes / self._rate_seconds if self._rate_seconds else None

    @property
    def ended(self) -> tuple[str, ...]:
        """The names of threads that do not run."""
        return tuple(thread.name for thread in self._threads if not thread.is_alive())

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def read(self, hashes: Sequence[Digest], deliver: Deliver) -> Ticket:
        """See `DiskStore.read`."""
        ticket = Ticket(hashes, deliver, self._tickets.put, self._limits.read_ahead_bytes)
        if len(self.ended) == len(self._threads):
            ticket.fail(Fault.INTERNAL)
        elif hashes:
            self._tickets.put(ticket)
        return ticket

    def close(self) -> None:
        """End the threads. Runs that are being read are delivered; nothing else is."""
        for _ in self._threads:
            self._tickets.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (ticket := self._tickets.get()) is not None:
            try:
                start = ticket.next_index()
                if start is not None and ticket.deliver(self._read(ticket, start)):
                    self._tickets.put(ticket)
            except Exception:  # whatever it is, others read on
                logger.exception("a read of the disk cache failed")
                self._counters.count_fault(Fault.INTERNAL)
                ticket.fail(Fault.INTERNAL)

    def _read(self, ticket: Ticket, start: int) -> ReadRun | ReadFailure:
        records = self._next_run(ticket.hashes, start)
        if not records:
            return ReadFailure(start, Fault.GONE)
        entries, began = list[Entry](), time.perf_counter()
        try:
            self._read_run(records, entries)
        except _Unreadable as error:
            if not entries:
                return self._failure(start, error.record, error.fault)
        except MemoryError:
            return self._failure(start, records[0], Fault.RESOURCES)
        run = ReadRun(start, tuple(entries))
        with self._counters.lock:
            kept = max(0.0, 1 - run.n_bytes / RATE_MEMORY_BYTES)
            self._rate_bytes = self._rate_bytes * kept + run.n_bytes
            self._rate_seconds = self._rate_seconds * kept + time.perf_counter() - began
            self._counters.read_entries += len(entries)
            self._counters.read_bytes += run.n_bytes
        self._catalog.touch(entries[-1].block_hash)
        extent = records[0].extent
        self._space.stamp(extent.name, extent.used_ns)
        return run

    def _next_run(self, hashes: Sequence[Digest], start: int) -> list[Record]:
        """The records of the next hashes, as long as they are adjacent in one extent."""
        run, n_bytes = list[Record](), 0
        for block_hash in hashes[start : start + MOST_ENTRIES]:
            record = self._catalog.get(block_hash)
            if record is None or not record.is_written:
                break
            n_bytes += record.head.n_bytes
            if run:
                last = run[-1]
                if (record.extent, record.head.offset) != (last.extent, last.head.end):
                    break
                if n_bytes > self._limits.run_bytes:
                    break
            run.append(record)
        return run

    def _read_run(self, records: Sequence[Record], entries: list[Entry]) -> None:
        """Append the entries, up to the first that is not what was written. Raises _Unreadable."""
        extent, start = records[0].extent, records[0].head.offset
        try:
            payload = self._space.read(extent.name, start, records[-1].head.end - start)
        except (OSError, MemoryError) as error:
            raise _Unreadable(records[0], fault_of(error)) from error
        for record in records:
            found = payload[record.head.offset - start : record.head.end - start]
            if (entry := parse(record.head, found)) is None:
                is_short = len(found) < record.head.n_bytes
                raise _Unreadable(record, Fault.SHORT_READ if is_short else Fault.CHECKSUM)
            entries.append(entry)

    def _failure(self, start: int, record: Record, fault: Fault) -> ReadFailure:
        extent = record.extent
        if extent.is_removed:
            return ReadFailure(start, Fault.GONE)
        if fault is Fault.MISSING:  # another process has evicted it
            self._catalog.remove([extent])
            return ReadFailure(start, Fault.GONE)
        self._counters.count_fault(fault)
        logger.warning("disk cache: %s cannot be read: %s", extent.name, fault)
        if fault is not Fault.RESOURCES:
            self._catalog.remove([extent])
        return ReadFailure(start, fault)
