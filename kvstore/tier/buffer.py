"""The writer's queue: extents to write, and removals and upkeep, done in the order given.

Bounded in bytes. No method blocks but `take`, which the writer calls, and `wait`.
"""

import threading
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from operator import gt, or_

from kvstore.tier.catalog import Catalog
from kvstore.tier.record import Record
from kvstore.tier.types import Extent
from kvstore.tokens import Digest


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
        self._hashes = Counter[Digest]()
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

    def allow(self, n_bytes: float, longest_path: int) -> None:
        """Set how many bytes may be written, queued ones included, and how long a path may be."""
        with self._changed:
            self._allowance, self._longest_path = n_bytes, longest_path

    def pause(self) -> None:
        """Accept no extent until `allow` is called. The longest path stays as it is: the engine
        does not offer an entry again that it found too far from its root.
        """
        with self._changed:
            self._allowance = 0

    def path_room(self, block_hash: Digest) -> int:
        """Bytes that a path may still take below this entry, or below this root."""
        with self._changed:
            return max(0, self._longest_path - self._path_to(block_hash))

    def put(self, extent: Extent) -> bool:
        """Queue the extent. False if there is no room for it or for so long a path, or if its
        parent is neither stored nor queued.
        """
        with self._changed:
            path_bytes = self._path_to(extent.parent)
            if extent.n_bytes > min(self._room(), self._longest_path - path_bytes):
                return False
            on_its_way = extent.parent in self._hashes
            if not on_its_way and not self._catalog.has_place(extent.root, extent.parent):
                return False
            for entry in extent.entries:
                path_bytes += entry.n_bytes
                self._path_bytes[entry.block_hash] = path_bytes
                has, before = entry.has, self._has.get(entry.block_hash)
                self._has[entry.block_hash] = tuple(map(or_, has, before)) if before else has
            self._hashes.update(entry.block_hash for entry in extent.entries)
            self._n_bytes += extent.n_bytes
            self._add(extent)
            return True

    def order(self, job: Removal | Upkeep) -> None:
        with self._changed:
            self._add(job)

    def held(self, hashes: Sequence[Digest]) -> int:
        """How many of them, from the first on, are stored or queued."""
        with self._changed:
            for count, block_hash in enumerate(hashes):
                if block_hash not in self._hashes and self._catalog.get(block_hash) is None:
                    return count
            return len(hashes)

    def roots(self) -> frozenset[Digest]:
        """The roots of the namespaces of which something is queued."""
        with self._changed:
            jobs = (*self._jobs, self._at_work)
            return frozenset(job.root for job in jobs if isinstance(job, Extent))

    def lacks(self, block_hash: Digest, has: Sequence[bool]) -> bool:
        """Whether one of these parts is neither stored nor queued."""
        with self._changed:
            record, waiting = self._catalog.get(block_hash), self._has.get(block_hash)
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
        """The job that was taken is done."""
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

    def _path_to(self, block_hash: Digest) -> int:
        found = self._path_bytes.get(block_hash)
        return self._catalog.path_bytes(block_hash) if found is None else found

    def _add(self, job: Job) -> None:
        self._jobs.append(job)
        self._changed.notify_all()

    def _let_go(self, extent: Extent) -> None:
        self._n_bytes -= extent.n_bytes
        self._hashes.subtract(entry.block_hash for entry in extent.entries)
        for entry in extent.entries:
            if not self._hashes[entry.block_hash]:
                del (
                    self._hashes[entry.block_hash],
                    self._path_bytes[entry.block_hash],
                    self._has[entry.block_hash],
                )
