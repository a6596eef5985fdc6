"""The one thread that writes: payloads first, then the index, then the catalog. Of the processes
that share a directory one writes at a time, and what it leaves is within the limit.

So whatever the catalog offers can be read, and a process that is killed leaves at most a payload
that no index knows, which the next one writes over. Nothing is synced: what was handed to the
operating system outlives the process, and after a power loss the checksums find what is missing.
"""

import logging
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from operator import gt
from time import monotonic

from kvstore.tier.buffer import Job, Removal, Upkeep, WriteBuffer
from kvstore.tier.catalog import Catalog
from kvstore.tier.disk.daily_budget import DailyBudget
from kvstore.tier.disk.index import Index, index_fault
from kvstore.tier.disk.locks import WriteLock
from kvstore.tier.disk.others import Others
from kvstore.tier.disk.segments import Place, Segments
from kvstore.tier.disk.space import Space
from kvstore.tier.record import Record, checksum
from kvstore.tier.tally import Tally
from kvstore.tier.types import Entry, Extent, Fault, fault_of
from kvstore.tokens import Digest

UPKEEP_SECONDS = 10.0

logger = logging.getLogger(__name__)


@dataclass
class Writer:
    """Its methods are called by one thread at a time, and but for `run`, `alone` and `close` with
    the lock held. These three do not raise for the disk's sake.
    """

    index: Index
    segments: Segments
    lock: WriteLock
    space: Space
    others: Others
    catalog: Catalog
    buffer: WriteBuffer
    budget: DailyBudget
    tally: Tally
    clock: Callable[[], float]
    keys: Iterator[int]

    def __post_init__(self) -> None:
        self._left_behind = list[Record]()
        self._last_fault: Fault | None = None  # since something was written

    def run(self) -> None:
        """Until the buffer is closed. Whatever comes of a job leaves the next one a chance."""
        due = monotonic() + UPKEEP_SECONDS
        while (job := self.buffer.take(max(due - monotonic(), 0.0))) is not None:
            try:
                self.alone(partial(self._carry_out, job))
            finally:
                self.buffer.done()
            if isinstance(job, Upkeep):
                due = monotonic() + UPKEEP_SECONDS

    def alone(self, work: Callable[[], None]) -> None:
        """Do this while no other process changes anything in the directory. What others have
        evicted is seen before it, and behind it others see what has been used here.
        """
        try:
            with self.lock:
                self.space.begin()
                for number in self.segments.lost(self.catalog.segments()):
                    self._evict(number)
                try:
                    work()
                finally:
                    self.space.changed(self.space.folder)
                self._shrink()
                for number, last_used in self.catalog.take_used().items():
                    self.segments.stamp(number, last_used)
        except Exception as error:
            self._failed(error)

    def keep_up(self) -> None:
        """Every now and then; a disk that failed is given another chance. The own folder is
        measured anew, because a person may have removed files.
        """
        self.space.changed(self.space.folder)
        self._shrink()
        self._allow()
        left_behind, self._left_behind = self._left_behind, []
        self.erase(left_behind)
        self.index.touch(self.catalog.take_touched())

    def close(self) -> None:
        """The last of all."""
        self.alone(self.keep_up)
        with suppress(OSError, sqlite3.Error), self.lock:
            self.index.close()

    def erase(self, records: Sequence[Record]) -> None:
        """Rows first, then files: a row without its file would be a fault at the next start. Where
        rows cannot go, files go all the same, and rows are tried again later. Raises OSError.
        """
        try:
            self.index.remove([record.key for record in records])
        except Exception as error:
            self._left_behind += records
            self._failed(error)
        live = self.catalog.segments()
        for number in {record.segment for record in records}:
            if not live.get(number):
                self.catalog.forget_segment(number)
                self.segments.remove(number)
                self.space.changed(self.space.folder)

    def _carry_out(self, job: Job) -> None:
        match job:
            case Extent():
                self._store(job)
            case Removal():
                self.erase(job.records)
            case Upkeep():
                self.keep_up()

    def _store(self, extent: Extent) -> None:
        now = self.clock()
        self.catalog.touch(extent.parent, now)
        wanted = [
            (parent, self._completed(entry))
            for parent, entry in extent.with_parents()
            if self._wants(entry)
        ]
        if not wanted:
            return
        entries = [entry for _, entry in wanted]
        n_bytes = sum(entry.n_bytes for entry in entries)
        if n_bytes > self.budget.left() or not self._make_room(n_bytes):
            self.tally.count(refused_entries=len(entries))
            self._allow()
        elif not self.catalog.has_place(extent.root, extent.parent):
            self.tally.count(orphaned_entries=len(entries))
        else:
            places = self.segments.places(entries)
            self._append(places, entries, self._records(extent.root, wanted, places, now))

    def _append(
        self, places: Sequence[Place], entries: Sequence[Entry], records: Sequence[Record]
    ) -> None:
        n_bytes = sum(entry.n_bytes for entry in entries)
        try:
            self.segments.write(places, entries)
            self.budget.spend(n_bytes)
            self.index.add(records)
        except BaseException:
            self.segments.retreat(places)
            raise
        self.segments.advance(places[-1], entries[-1])
        self._last_fault = None
        self._allow()
        self.tally.count(written_entries=len(entries), written_bytes=n_bytes)
        self.erase(self.buffer.publish(records))

    def _wants(self, entry: Entry) -> bool:
        """Whether it is not there, or brings parts that were missing."""
        stored = self.catalog.get(entry.block_hash)
        return stored is None or stored.lacks(entry.has)

    def _completed(self, entry: Entry) -> Entry:
        """With the parts that are stored, where these can be read: it takes their place."""
        stored = self.catalog.get(entry.block_hash)
        if stored is None or not any(map(gt, stored.has, entry.has)):
            return entry
        try:
            payload = self.segments.read(stored.segment, stored.offset, stored.n_bytes)
        except OSError as error:
            self.tally.fault(fault_of(error))
            return entry
        found = stored.cut(payload)
        if found is None:
            self.tally.fault(Fault.CHECKSUM)
            return entry
        return entry.with_parts_of(found)

    def _records(
        self,
        root: Digest,
        wanted: Sequence[tuple[Digest, Entry]],
        places: Sequence[Place],
        now: float,
    ) -> list[Record]:
        """Under keys that are never used again, whatever becomes of them."""
        return [
            Record(
                *(next(self.keys), entry.block_hash, parent, root, *place),
                checksum=_checksum(parent, entry),
                n_tokens=entry.n_tokens,
                part_bytes=entry.part_bytes,
                n_bytes=entry.n_bytes,
                last_used=now,
            )
            for (parent, entry), place in zip(wanted, places, strict=True)
        ]

    def _shrink(self) -> None:
        while self.space.exceeds() and self._drop_coldest():
            continue

    def _make_room(self, n_bytes: int) -> bool:
        """Whether there is, now. Nothing goes where others have taken of what was to be left free:
        they would take what comes free of it, too.
        """
        while self.space.lacks(n_bytes):
            if self.space.is_taken or not self._drop_coldest():
                return False
        return True

    def _drop_coldest(self) -> bool:
        """The segment of any model that was used longest ago, with what hangs from it. One's own
        that grows is the last. Whether there was any.
        """
        current = self.segments.current
        mine, other = self.catalog.coldest_segment(but=current), self.others.coldest()
        if other is not None and (
            mine in (None, current) or other.last_used <= self.catalog.last_used(mine)
        ):
            self.others.drop(other)
            self.space.changed(other.folder)
            return True
        if mine is None:
            return False
        self._evict(mine)
        return True

    def _evict(self, number: int) -> None:
        """A segment of one's own, whose file may have gone."""
        evicted = self.catalog.remove_segment(number)
        self.tally.count(evicted_entries=len(evicted))
        self.erase(evicted)

    def _allow(self) -> None:
        """Accept what the daily budget has left, or nothing while other programs fill the disk."""
        if self.space.is_taken:
            self.buffer.pause()
        else:
            self.buffer.allow(self.budget.left(), self.space.longest_path)

    def _failed(self, error: Exception) -> None:
        """Nothing more is taken until something that waits can be written, or the next upkeep. A
        disk that goes on failing is logged once.
        """
        fault = _fault_of(error)
        self.tally.fault(fault)
        self.buffer.pause()
        if fault is Fault.INTERNAL:
            logger.error("the disk cache's writer failed, and goes on", exc_info=error)
        elif fault is not self._last_fault:
            logger.warning("the disk cache cannot be written (%s): %s", fault, error)
        self._last_fault = fault


def _fault_of(error: Exception) -> Fault:
    match error:
        case OSError():
            return fault_of(error)
        case sqlite3.Error():
            return index_fault(error)
        case MemoryError():
            return Fault.RESOURCES
        case _:
            return Fault.INTERNAL


def _checksum(parent: Digest, entry: Entry) -> bytes:
    payload = [part for part in entry.parts if part is not None]
    return checksum(entry.block_hash, parent, entry.n_tokens, entry.part_bytes, payload)
