"""The one thread that writes extents, and deletes them.

Of the processes that share a directory one writes at a time, and keeps it within the limit. Small
extents are joined: a queued one waits a moment for those that continue it.
"""

import logging
import secrets
import threading
from time import monotonic

from kvstore.disk.catalog import Catalog, CatalogExtent
from kvstore.disk.extent import SUFFIX, encode
from kvstore.disk.folder import DailyBudget, FileLock
from kvstore.disk.space import Space, longest_path
from kvstore.disk.types import DiskCounters, DiskLimits, Fault, fault_of

UPKEEP_SECONDS = 10.0
"""How often uses are noted and the folder is measured, and how soon a disk that failed is tried."""

JOIN_SECONDS = 1.0
"""How long a short extent may wait for more of its path."""

logger = logging.getLogger(__name__)


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
    ) -> None:
        self._catalog = catalog
        self._space = space
        self._budget = budget
        self._lock = lock
        self._limits = limits
        self._counters = counters
        self._changed = catalog.changed
        self._at_work: CatalogExtent | None = None
        self._undeleted = list[str]()  # files that the thread is to delete
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
    def is_alive(self) -> bool:
        return self._thread.is_alive()

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
            self._catalog.remove(list(self._catalog.queue))
            self._catalog.allowance = 0
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
                    if waiting is not None and not waiting.is_removed:
                        self._write(waiting)
                finally:
                    self._stamp()
        except Exception as error:
            self._failed(error)
            if waiting is not None and not waiting.name:
                self._catalog.remove([waiting])
        finally:
            with self._changed:
                if waiting is not None:
                    waiting.entries = ()
                self._at_work = None
                self._is_working = False
                self._changed.notify_all()

    def _wait(self) -> bool:
        """Wait for something to do, and take an extent if one is ready. False when closed."""
        catalog = self._catalog
        with self._changed:
            while not (catalog.doomed or self._wants_upkeep or monotonic() >= self._upkeep_at):
                ready_in = self._ready_in()
                if ready_in <= 0:
                    break
                if self._is_closed:
                    return False
                self._changed.wait(max(min(ready_in, self._upkeep_at - monotonic()), 0.0))
            if catalog.queue and self._ready_in() <= 0:
                self._at_work = catalog.take_queued(self._limits.extent_bytes)
            self._undeleted += catalog.take_doomed()
            self._is_working = True
            return True

    def _ready_in(self) -> float:
        """The seconds until the first extent of the queue is written."""
        if not self._catalog.queue:
            return UPKEEP_SECONDS
        if self._n_flushing or 2 * self._catalog.n_bytes > self._limits.buffer_bytes:
            return 0.0
        return next(iter(self._catalog.queue.values())) + JOIN_SECONDS - monotonic()

    def _write(self, extent: CatalogExtent) -> None:
        entries = extent.entries
        n_bytes = sum(entry.n_bytes for entry in entries)
        self._catalog.touch(extent.hashes[-1])
        header, encoded = encode(extent.root, extent.parent, entries)
        if n_bytes > self._budget.left() or not self._make_room(header.end, extent):
            n_refused = self._catalog.remove([extent])
            self._counters.refused_entries += n_refused
            logger.info("disk cache: %d blocks were not written for lack of space", n_refused)
            if self._catalog.allowance:  # or something has failed in this turn
                self._allow()
            return
        name = secrets.token_hex(8) + SUFFIX
        payload = (part for entry in entries for part in entry.parts if part is not None)
        self._budget.spend(n_bytes)
        self._space.create(name, [encoded, *payload])
        self._counters.written_bytes += n_bytes
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
            if self._space.is_taken or not self._evict(extent):
                return False
        return not extent.is_removed

    def _shrink(self) -> None:
        while self._space.exceeds() and self._evict(None):
            continue

    def _evict(self, extent: CatalogExtent | None) -> bool:
        """Remove what is coldest. False where there is nothing, where its file cannot be deleted,
        or where it was used after this extent, as all that it hangs from was.
        """
        if (cold := self._space.coldest()) is None:
            return False
        if not self._space.is_own(cold):
            self._space.remove(cold)
            return True
        mine = self._catalog.named(cold.name)
        if mine is None:
            self._undeleted.append(cold.name)
        elif extent is not None and mine.used_ns > extent.used_ns:
            return False
        else:
            n_evicted = self._catalog.remove([mine])
            self._counters.evicted_entries += n_evicted
            logger.debug("disk cache: %d blocks were evicted", n_evicted)
        self._delete()
        return cold.name not in self._undeleted

    def _notice_evictions(self) -> None:
        """Other processes, or people, may have removed files."""
        named = map(self._catalog.named, self._space.take_lost())
        if lost := [extent for extent in named if extent is not None]:
            self._counters.evicted_entries += self._catalog.remove(lost)

    def _delete(self) -> None:
        """Delete the files of what has been removed. One that resists is tried again next time."""
        names, self._undeleted = self._undeleted + self._catalog.take_doomed(), []
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
            self._catalog.allowance = 0 if self._is_disk_full or self._is_closed else left
            if not self._is_disk_full:
                self._catalog.longest_path = longest_path(self._space.allowed_bytes)

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
        self._catalog.allowance = 0
        if fault is Fault.INTERNAL:
            logger.error("the disk cache's writer failed, and goes on", exc_info=error)
        elif fault is not self.fault:
            logger.warning("the disk cache cannot be written (%s): %s", fault, error)
        self.fault = fault

    def _is_idle(self) -> bool:
        has_work = self._catalog.queue or self._catalog.doomed or self._wants_upkeep
        return not (has_work or self._is_working)
