"""The queue of extents to write, and the one thread that writes them.

Of the processes that share a directory one writes at a time, and keeps it within the limit. Small
extents are joined: one that continues a queued extent is appended to it, and a short extent waits a
moment for more of its path.
"""

import logging
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic

from kvstore.disk.catalog import Catalog, CatalogExtent, Reservation
from kvstore.disk.extent import SUFFIX, encode
from kvstore.disk.folder import DailyBudget, FileLock
from kvstore.disk.space import Space, longest_path
from kvstore.disk.types import (
    Buffer,
    DiskCounters,
    DiskLimits,
    Entry,
    EntryHead,
    Fault,
    fault_of,
)
from kvstore.tokens import Digest

UPKEEP_SECONDS = 10.0
"""How often uses are noted and the folder is measured, and how soon a disk that failed is tried."""

JOIN_SECONDS = 1.0
"""How long a short extent may wait for more of its path."""

CLEARED_AT_ONCE = 100
"""Extents that a slow clear removes while other threads wait: a millisecond's work."""

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _QueuedExtent:
    """A pending extent with its data. `since`: a monotonic time in seconds."""

    extent: CatalogExtent
    since: float
    entries: list[Entry] = field(default_factory=list)
    n_bytes: int = 0


class Writer:
    """Any thread may call the methods above `run`. None of them waits for the disk, except `flush`
    and `close`.
    """

    def __init__(
        self,
        catalog: Catalog,
        space: Space,
        budget: DailyBudget,
        lock: FileLock,
        limits: DiskLimits,
        counters: DiskCounters,
        clock: Callable[[], float],
    ) -> None:
        self._catalog = catalog
        self._space = space
        self._budget = budget
        self._lock = lock
        self._limits = limits
        self._counters = counters
        self._clock = clock
        self._changed = threading.Condition()
        self._queue = OrderedDict[CatalogExtent, _QueuedExtent]()
        self._last = dict[Digest, _QueuedExtent]()  # by the hash of the last entry
        self._at_work: _QueuedExtent | None = None
        self._doomed = list[str]()  # files to be deleted
        self._n_long = 0  # of the queued extents: those that wait for no further entry
        self._n_bytes = 0  # reserved, waiting or being written
        self._allowance = 0.0  # the most that `_n_bytes` may be
        self._longest_path = 0
        self._undeleted = list[str]()  # files that the thread is to delete
        self._strangers = list[str]()  # files with names of extents that the catalog does not know
        self._is_working = False
        self._upkeep_at = 0.0
        self._wants_upkeep = True
        self._n_flushing = 0
        self._is_closed = False
        self.fault: Fault | None = None  # of the last write; None: it succeeded
        self.is_day_spent = False
        self._is_disk_full = False  # by other programs
        self._thread = threading.Thread(target=self.run, name="disk-writer", daemon=True)

    @property
    def n_bytes(self) -> int:
        """Reserved, or accepted and not yet written."""
        return self._n_bytes

    @property
    def room(self) -> int:
        """Bytes that can be reserved now."""
        with self._changed:
            return self._room()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def now_ns(self) -> int:
        """The time of a use, later than any before: the clock may be set back."""
        return max(int(self._clock() * 1e9), self._catalog.latest_ns + 1)

    def path_room(self, block_hash: Digest) -> int:
        """Bytes that a path may still take below this entry, or below this root."""
        return max(0, self._longest_path - self._catalog.path_bytes(block_hash))

    def reserve(self, root: Digest, parent: Digest, head: EntryHead) -> Reservation | None:
        """See `DiskStore.reserve`."""
        with self._changed:
            missing = self._catalog.missing(head)
            if missing is None or not self._catalog.parent_exists(root, parent):
                return None
            if missing.n_bytes > min(self._room(), self.path_room(parent)):
                return None
            self._n_bytes += missing.n_bytes
            return self._catalog.reserve(root, parent, missing, self.now_ns())

    def write(self, reservation: Reservation, parts: Sequence[Buffer | None]) -> bool:
        """See `DiskStore.write`."""
        extent, head = reservation
        wanted = (
            None if size is None else part for part, size in zip(parts, head.sizes, strict=True)
        )
        entry = Entry(head.block_hash, head.n_tokens, tuple(wanted))
        if entry.sizes != head.sizes:
            raise ValueError(f"parts of {entry.sizes} bytes where {head.sizes} were reserved")
        with self._changed:
            if extent.is_removed:
                self._n_bytes -= head.n_bytes
                return False
            self._enqueue(extent, entry)
            self._changed.notify_all()
            return True

    def cancel(self, reservation: Reservation) -> None:
        """See `DiskStore.cancel`."""
        with self._changed:
            self._n_bytes -= reservation.head.n_bytes
            self._doom(self._catalog.remove([reservation.extent]))

    def remove(self, extents: Sequence[CatalogExtent]) -> int:
        """Remove extents and all that hangs from them: from the catalog now, from the disk soon.
        Returns how many entries that takes away.
        """
        with self._changed:
            removed = self._catalog.remove(extents)
            self._doom(removed)
            return sum(len(extent.hashes) for extent in removed if not extent.is_supplement)

    def clear(self, root: Digest | None) -> None:
        """Remove a namespace, or all."""
        with self._changed:
            self._doom(self._catalog.remove_namespace(root))

    def clear_slowly(self, root: Digest | None) -> None:
        """Remove a namespace, or all, CLEARED_AT_ONCE extents at a time, the leaves first. Other
        threads go on meanwhile, and may add to it.
        """
        extents = self._catalog.parents_first(root)
        while extents:
            self.remove(extents[-CLEARED_AT_ONCE:])
            del extents[-CLEARED_AT_ONCE:]

    def upkeep(self) -> None:
        """Run the upkeep of every UPKEEP_SECONDS soon."""
        with self._changed:
            self._wants_upkeep = True
            self._changed.notify_all()

    def flush(self, timeout: float | None) -> bool:
        """Wait until all is done. Returns whether it was in time."""
        with self._changed:
            self._n_flushing += 1
            self._changed.notify_all()
            is_done = self._changed.wait_for(self._is_idle, timeout)
            self._n_flushing -= 1
            return is_done

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the thread. Queued extents are dropped; the current write is finished."""
        with self._changed:
            self._doom(self._catalog.remove(list(self._queue)))
            self._is_closed = True
        self._thread.join()

    # The thread.

    def run(self) -> None:
        """Run jobs until the writer is closed. A failed job does not affect the next one."""
        while self._wait():
            self.turn()
        self.upkeep()
        self.turn()

    def turn(self) -> None:
        """Do what there is to do, while no other process changes the directory. Does not raise."""
        waiting, is_upkeep = self._at_work, self._wants_upkeep or monotonic() >= self._upkeep_at
        if is_upkeep:
            self._wants_upkeep = False
            self._upkeep_at = monotonic() + UPKEEP_SECONDS
        try:
            with self._lock:
                self._space.refresh()
                if is_upkeep:
                    self._space.look_again()
                self._notice_evictions()
                try:
                    self._delete()
                    self._shrink()
                    if is_upkeep:
                        self._try_again()
                        self._allow()
                    if waiting is not None and not waiting.extent.is_removed:
                        self._write(waiting)
                finally:
                    self._stamp()
        except Exception as error:
            self._failed(error)
            if waiting is not None and not waiting.extent.name:
                self.remove([waiting.extent])
        finally:
            with self._changed:
                self._n_bytes -= waiting.n_bytes if waiting else 0
                self._at_work = None
                self._is_working = False
                self._changed.notify_all()

    def _wait(self) -> bool:
        """Wait for something to do, and take an extent if one is ready. False when closed."""
        with self._changed:
            while not (self._doomed or self._wants_upkeep or monotonic() >= self._upkeep_at):
                ready_in = self._ready_in()
                if ready_in <= 0:
                    break
                if self._is_closed:
                    return False
                self._changed.wait(max(min(ready_in, self._upkeep_at - monotonic()), 0.0))
            if self._queue and self._ready_in() <= 0:
                _, self._at_work = self._queue.popitem(last=False)
                self._complete(self._at_work)
            self._take_doomed()
            self._is_working = True
            return True

    def _ready_in(self) -> float:
        """The seconds until the first extent of the queue is written."""
        if not self._queue:
            return UPKEEP_SECONDS
        if self._n_flushing or self._n_long or 2 * self._n_bytes > self._limits.buffer_bytes:
            return 0.0
        return next(iter(self._queue.values())).since + JOIN_SECONDS - monotonic()

    def _write(self, waiting: _QueuedExtent) -> None:
        extent = waiting.extent
        self._catalog.touch(extent.hashes[-1], self.now_ns())
        header, encoded = encode(extent.root, extent.parent, waiting.entries)
        if waiting.n_bytes > self._budget.left() or not self._make_room(header.end, extent):
            n_refused = self.remove([extent])
            self._counters.refused_entries += n_refused
            logger.info("disk cache: %d blocks were not written for lack of space", n_refused)
            self._allow()
            return
        name = secrets.token_hex(8) + SUFFIX
        payload = (part for entry in waiting.entries for part in entry.parts if part is not None)
        self._budget.spend(waiting.n_bytes)
        self._space.create(name, [encoded, *payload])
        self._counters.written_bytes += waiting.n_bytes
        if self._catalog.publish(extent, name, header):
            self._counters.written_entries += len(header.entries)
        else:  # it was removed while it was written
            self._undeleted.append(name)
        self.fault = None
        self._allow()
        self._delete()

    def _make_room(self, n_bytes: int, extent: CatalogExtent) -> bool:
        """Evict until the extent fits, and return whether it does. Nothing is evicted while other
        programs use the space that stays free, since they could use the freed space as well.
        Extents above this one are never evicted.
        """
        while self._space.lacks(n_bytes):
            coldest = self._catalog.coldest()
            is_later = coldest is not None and coldest.used_ns > extent.used_ns
            if coldest is not None and is_later and self._catalog.hangs_from(extent, coldest):
                coldest = None
            if self._space.is_taken or not self._evict(coldest):
                return False
        return not extent.is_removed

    def _shrink(self) -> None:
        while self._space.exceeds() and self._evict(self._catalog.coldest()):
            continue

    def _evict(self, mine: CatalogExtent | None) -> bool:
        """Remove a file without a use of this folder, or what was used longest ago: this extent, or
        one of another model. False where there is nothing.
        """
        if self._strangers:
            self._undeleted.append(self._strangers.pop())
            self._delete()
            return True
        other = self._space.coldest_of_others()
        if other is not None and (mine is None or other.used_ns <= mine.used_ns):
            self._space.remove(other)
        elif mine is not None:
            n_evicted = self.remove([mine])
            self._counters.evicted_entries += n_evicted
            logger.debug("disk cache: %d blocks were evicted", n_evicted)
            self._delete()
        return other is not None or mine is not None

    def _notice_evictions(self) -> None:
        """Other processes, or people, may have removed files."""
        self._strangers += [name for name in self._space.take_found() if not self._knows(name)]
        named = map(self._catalog.named, self._space.take_lost())
        if lost := [extent for extent in named if extent is not None]:
            self._counters.evicted_entries += self.remove(lost)

    def _knows(self, name: str) -> bool:
        return self._catalog.named(name) is not None

    def _delete(self) -> None:
        """Delete the files of what has been removed. One that resists is tried again next time."""
        with self._changed:
            self._take_doomed()
        names, self._undeleted = self._undeleted, []
        for name in names:
            try:
                self._space.delete(name)
            except OSError as error:
                self._undeleted.append(name)
                self._failed(error)

    def _stamp(self) -> None:
        for extent in self._catalog.take_touched():
            self._space.stamp(extent.name, extent.used_ns)

    def _allow(self) -> None:
        """Accept what today's budget has left, or nothing while other programs fill the disk."""
        left = self._budget.left()
        is_spent = left <= 0
        if is_spent and not self.is_day_spent:
            logger.warning("the disk cache has written as much as it may today, and writes no more")
        if self._space.is_taken and not self._is_disk_full:
            logger.warning("the disk cache writes nothing while other programs fill the disk")
        with self._changed:
            self.is_day_spent, self._is_disk_full = is_spent, self._space.is_taken
            if self._is_disk_full:
                self._allowance = 0
            else:
                self._allowance = left
                self._longest_path = longest_path(self._space.allowed_bytes)

    def _try_again(self) -> None:
        """Whether a disk that failed can be written again. A successful small write proves nothing
        for a full disk, so that fault lasts until an extent is written.
        """
        if self.fault not in (None, Fault.NO_SPACE):
            self._budget.spend(0)
            self.fault = None

    def _failed(self, error: Exception) -> None:
        """Accept nothing until a write succeeds or the next upkeep. Repeated failures are logged
        once.
        """
        fault = fault_of(error)
        self._counters.count_fault(fault)
        with self._changed:
            self._allowance = 0
        if fault is Fault.INTERNAL:
            logger.error("the disk cache's writer failed, and goes on", exc_info=error)
        elif fault is not self.fault:
            logger.warning("the disk cache cannot be written (%s): %s", fault, error)
        self.fault = fault

    # With `_changed` held.

    def _enqueue(self, extent: CatalogExtent, entry: Entry) -> None:
        """Append a reserved entry to the extent that ends with its parent, if that is short and
        still waits; else its own extent is the next of the queue. An entry of fewer tokens than its
        parent has nothing below it, so it does not take its place at the end.
        """
        waiting = None if extent.is_supplement else self._last.get(extent.parent)
        if (
            waiting is None
            or waiting.n_bytes + entry.n_bytes > self._limits.extent_bytes
            or waiting.entries[-1].n_tokens != entry.n_tokens
        ):
            waiting = _QueuedExtent(extent, monotonic())
            self._queue[extent] = waiting
        else:
            del self._last[extent.parent]
            self._catalog.join(extent, waiting.extent)
        was_long = self._is_long(waiting)
        waiting.entries.append(entry)
        waiting.n_bytes += entry.n_bytes
        self._n_long += self._is_long(waiting) - was_long
        if not extent.is_supplement:
            self._last[entry.block_hash] = waiting

    def _doom(self, removed: Sequence[CatalogExtent]) -> None:
        """These are not to be written any more, and their files are to be deleted."""
        self._doomed += [extent.name for extent in removed if extent.name]
        for extent in removed:
            waiting = self._queue.pop(extent, None)
            if waiting is not None:
                self._n_bytes -= waiting.n_bytes
                self._complete(waiting)
        self._changed.notify_all()

    def _complete(self, waiting: _QueuedExtent) -> None:
        """Close an extent that has left the queue: nothing is appended to it any more."""
        self._n_long -= self._is_long(waiting)
        last = waiting.extent.hashes[-1]
        if self._last.get(last) is waiting:
            del self._last[last]

    def _is_long(self, waiting: _QueuedExtent) -> bool:
        return waiting.n_bytes >= self._limits.extent_bytes

    def _take_doomed(self) -> None:
        self._undeleted += self._doomed
        self._doomed = []

    def _room(self) -> int:
        if self._is_closed:
            return 0
        return max(0, int(min(self._limits.buffer_bytes, self._allowance)) - self._n_bytes)

    def _is_idle(self) -> bool:
        return not (self._queue or self._doomed or self._wants_upkeep or self._is_working)
