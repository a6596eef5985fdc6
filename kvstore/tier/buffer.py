"""What has been handed to the writer and is not done: extents and chores, in order.

Bounded in bytes. Nothing here waits but the writer, and whoever asks to.
"""

import threading
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from operator import gt, or_

from kvstore.digest import Digest
from kvstore.tier.catalog import Catalog
from kvstore.tier.record import Record
from kvstore.tier.types import Extent


@dataclass(frozen=True, slots=True)
class Removal:
    """These records have left the catalog; their rows and empty segments are to go."""

    records: Sequence[Record]


@dataclass(frozen=True, slots=True)
class Upkeep:
    """Shrink where there is too little space, write down what was used."""


Job = Extent | Removal | Upkeep


class WriteBuffer:
    """See the module."""

    def __init__(self, catalog: Catalog, most_bytes: int) -> None:
        self._catalog = catalog
        self._most_bytes = most_bytes
        self._allowance = 0.0
        self._longest_path = 0
        self._jobs = deque[Job]()
        self._n_bytes = 0
        self._names = Counter[Digest]()
        self._path_bytes: dict[Digest, int] = {}
        self._has: dict[Digest, tuple[bool, ...]] = {}  # which parts are on their way
        self._at_work: Job | None = None
        self._is_revoked = False
        self._is_closed = False
        self._changed = threading.Condition()

    @property
    def n_bytes(self) -> int:
        return self._n_bytes

    @property
    def room(self) -> int:
        """Bytes that would be taken now."""
        with self._changed:
            return self._room()

    def allow(self, n_bytes: float, longest_path: int = 0) -> None:
        """So much may be written from now on, what waits here included, and a path be so long."""
        with self._changed:
            self._allowance, self._longest_path = n_bytes, longest_path

    def path_room(self, name: Digest) -> int:
        """Bytes that a path may still take behind this entry, or from this root on."""
        with self._changed:
            return max(0, self._longest_path - self._path_to(name))

    def put(self, extent: Extent) -> bool:
        """Whether it was taken: there must be room, also for a path of that length, and its parent
        stored or on its way.
        """
        with self._changed:
            path_bytes = self._path_to(extent.parent)
            if extent.n_bytes > min(self._room(), self._longest_path - path_bytes):
                return False
            on_its_way = extent.parent in self._names
            if not on_its_way and not self._catalog.has_place(extent.root, extent.parent):
                return False
            for entry in extent.entries:
                path_bytes += entry.n_bytes
                self._path_bytes[entry.name] = path_bytes
                has, before = entry.has, self._has.get(entry.name)
                self._has[entry.name] = tuple(map(or_, has, before)) if before else has
            self._names.update(entry.name for entry in extent.entries)
            self._n_bytes += extent.n_bytes
            self._add(extent)
            return True

    def order(self, job: Removal | Upkeep) -> None:
        with self._changed:
            self._add(job)

    def held(self, names: Sequence[Digest]) -> int:
        """How many of them, from the first on, are stored or on their way."""
        with self._changed:
            for count, name in enumerate(names):
                if name not in self._names and self._catalog.get(name) is None:
                    return count
            return len(names)

    def roots(self) -> frozenset[Digest]:
        """Of all namespaces of which something is on its way."""
        with self._changed:
            jobs = (*self._jobs, self._at_work)
            return frozenset(job.root for job in jobs if isinstance(job, Extent))

    def lacks(self, name: Digest, has: Sequence[bool]) -> bool:
        """Whether one of these parts is neither stored nor on its way."""
        with self._changed:
            record, waiting = self._catalog.get(name), self._has.get(name)
            missing = tuple(map(gt, has, waiting)) if waiting else tuple(has)
            return any(missing) and (record is None or record.lacks(missing))

    def revoke(self, root: Digest | None) -> None:
        """Extents of this namespace, or all, are not to be stored any more."""
        with self._changed:
            self._drop(root)
            if isinstance(self._at_work, Extent) and root in (None, self._at_work.root):
                self._is_revoked = True

    def publish(self, records: Sequence[Record]) -> Sequence[Record]:
        """The extent at work is on disk. Returns the records that are no use after all."""
        with self._changed:
            return records if self._is_revoked else self._catalog.add(records)

    def take(self, timeout: float) -> Job | None:
        """The next job; upkeep when none came in so many seconds, or none are left, whatever else
        waits; None at the end.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._is_closed, timeout)
            if self._is_closed and not self._jobs:
                return None
            self._at_work = self._jobs.popleft() if self._jobs and timeout > 0 else Upkeep()
            self._is_revoked = False
            return self._at_work

    def done(self) -> None:
        """The job that was taken is."""
        with self._changed:
            if isinstance(self._at_work, Extent):
                self._let_go(self._at_work)
            self._at_work = None
            self._changed.notify_all()

    def wait(self, timeout: float | None) -> bool:
        """Whether all is done, or was in time."""
        with self._changed:
            return self._changed.wait_for(self._is_idle, timeout)

    def close(self) -> None:
        """Take nothing more; extents that wait are dropped, and removals are not. What is being
        written is waited for anyway, and kept.
        """
        with self._changed:
            self._drop(None)
            self._is_closed = True

    def _drop(self, root: Digest | None) -> None:
        """What waits of this namespace, or all."""
        kept = deque[Job]()
        for job in self._jobs:
            if isinstance(job, Extent) and root in (None, job.root):
                self._let_go(job)
            else:
                kept.append(job)
        self._jobs = kept
        self._changed.notify_all()

    def _is_idle(self) -> bool:
        return not self._jobs and self._at_work is None

    def _room(self) -> int:
        if self._is_closed:
            return 0
        return max(0, int(min(self._most_bytes, self._allowance)) - self._n_bytes)

    def _path_to(self, name: Digest) -> int:
        found = self._path_bytes.get(name)
        return self._catalog.path_bytes(name) if found is None else found

    def _add(self, job: Job) -> None:
        self._jobs.append(job)
        self._changed.notify_all()

    def _let_go(self, extent: Extent) -> None:
        self._n_bytes -= extent.n_bytes
        self._names.subtract(entry.name for entry in extent.entries)
        for entry in extent.entries:
            if not self._names[entry.name]:
                del self._names[entry.name], self._path_bytes[entry.name], self._has[entry.name]
