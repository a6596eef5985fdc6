"""The in-memory catalog of stored and pending data: entries by hash, the tree of extents, and the
queue of those to be written.

An extent is *pending* from when room is reserved for its first entry until its file has its name.
Look-ups are a few dictionary reads, which any thread makes without waiting. Changes hold
`Catalog.changed`, and no method waits for the disk. Two invariants: the parent of an entry is a
root or has a record, and an extent that others hang from was used later than they were, so the
coldest one has nothing below it.

Nothing but `load` and `problems` looks at all extents: there may be a hundred thousand.
"""

import threading
from bisect import bisect_left
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from time import monotonic
from typing import NamedTuple

from kvstore.disk.extent import ExtentHeader
from kvstore.disk.types import Buffer, Entry, EntryHead
from kvstore.tokens import Digest

CLEARED_AT_ONCE = 100
"""Extents that a slow clear removes while other threads wait: a millisecond's work."""


@dataclass(eq=False, slots=True)
class CatalogExtent:
    """A run of entries in one file, which is called `name` once it is written.

    `used_ns`: when it was last used, in nanoseconds of Unix time; `first_tokens`: the length in
    tokens of the entry with which it begins. While it is pending, `n_bytes` are those of its
    entries, and `entries` has them once they are there.
    """

    root: Digest
    parent: Digest
    hashes: list[Digest] = field(default_factory=list)
    used_ns: int = 0
    name: str = ""
    first_tokens: int = 0
    n_bytes: int = 0
    entries: Sequence[Entry] = ()
    is_removed: bool = False


@dataclass(eq=False, slots=True)
class Record:
    """An entry of an extent. `path_bytes`: of the path from the root to this entry."""

    extent: CatalogExtent
    head: EntryHead
    path_bytes: int

    @property
    def is_written(self) -> bool:
        return bool(self.head.checksum)


class Reservation(NamedTuple):
    """Room for an entry, whose bytes follow later.

    `extent` is pending and has this one entry. It is removed when its parent is.
    """

    extent: CatalogExtent
    head: EntryHead


class FoundExtent(NamedTuple):
    """An extent in a folder: the name of its file, its mtime in nanoseconds, and its header."""

    name: str
    used_ns: int
    header: ExtentHeader


class Catalog:
    """See the module."""

    def __init__(self, buffer_bytes: int, clock: Callable[[], float]) -> None:
        """`buffer_bytes`: the most that may be pending; `clock` has Unix time."""
        self._buffer_bytes = buffer_bytes
        self._clock = clock
        self._latest_ns = 0  # when anything was last used
        self.changed = threading.Condition()
        """Notified of what the writer has to do, and when that is done."""
        self.queue = OrderedDict[CatalogExtent, float]()
        """The pending extents, of one entry each, that have their bytes, and since when."""
        self.doomed: list[str] = []  # files to be deleted
        self.n_bytes = 0  # of all pending extents: reserved, waiting or being written
        self.allowance = 0.0  # the most that `n_bytes` may be, apart from the buffer
        self.longest_path = 0  # in bytes
        self._records: dict[Digest, Record] = {}
        self._by_root: defaultdict[Digest, set[CatalogExtent]] = defaultdict(set)
        self._by_name: dict[str, CatalogExtent] = {}  # those that have been written
        self._below: defaultdict[Digest, set[CatalogExtent]] = defaultdict(set)  # by their parent
        self._lengths: defaultdict[Digest, Counter[int]] = defaultdict(Counter)
        self._touched: set[CatalogExtent] = set()
        self._n_written = 0

    def __len__(self) -> int:
        """The number of readable entries."""
        return self._n_written

    # Look-ups.

    def get(self, block_hash: Digest) -> Record | None:
        return self._records.get(block_hash)

    def known(self, hashes: Sequence[Digest]) -> int:
        """The number of leading hashes of a path that can be read."""
        return bisect_left(hashes, True, key=self._is_unreadable)

    def held(self, hashes: Sequence[Digest]) -> int:
        """The number of leading hashes of a path that are stored or pending."""
        return bisect_left(hashes, True, key=lambda block_hash: block_hash not in self._records)

    def _is_unreadable(self, block_hash: Digest) -> bool:
        record = self._records.get(block_hash)
        return record is None or not record.is_written

    @property
    def room(self) -> int:
        """Bytes that can be reserved now."""
        return max(0, int(min(self._buffer_bytes, self.allowance)) - self.n_bytes)

    def path_room(self, block_hash: Digest) -> int:
        """Bytes that a path may still take below this entry, or below this root."""
        return max(0, self.longest_path - self._path_bytes(block_hash))

    def lengths_below(self, block_hash: Digest) -> frozenset[int]:
        """The lengths in tokens of the readable entries with which an extent below this hash
        begins. Entries shorter than a block always begin one.
        """
        with self.changed:
            return frozenset(self._lengths.get(block_hash, ()))

    def roots(self) -> frozenset[Digest]:
        """The roots of all namespaces that have an extent."""
        with self.changed:
            return frozenset(self._by_root)

    def named(self, name: str) -> CatalogExtent | None:
        """The extent that is in the file of this name."""
        return self._by_name.get(name)

    # Changes.

    def load(self, found: Collection[FoundExtent]) -> list[str]:
        """Take the extents of a folder. Returns the names of the files without a use, because their
        parents are missing or others have the same entries.

        What seems to have been used in the future was written while the clock was ahead. It was
        used now, in the same order: else it would outlive all that is used from now on.
        """
        now_ns = self._now_ns()
        later = sorted((each for each in found if each.used_ns > now_ns), key=lambda it: it.used_ns)
        used_ns = {each.name: now_ns + place for place, each in enumerate(later, start=1)}
        found = [each._replace(used_ns=used_ns.get(each.name, each.used_ns)) for each in found]
        with self.changed:
            below = defaultdict[tuple[Digest, Digest], list[FoundExtent]](list)
            for each in found:
                below[each.header.root, each.header.parent].append(each)
            ready = [it for (root, parent), its in below.items() if root == parent for it in its]
            for each in ready:  # grows during the walk
                if self._load(each):
                    for entry in each.header.entries:
                        ready += below.get((each.header.root, entry.block_hash), ())
            self._touched.update(self._by_name[name] for name in used_ns.keys() & self._by_name)
            for extent in reversed(self._by_name.values()):  # what is below before what is above
                self._use(islice(self._above(extent), 1), extent.used_ns + 1)
            return [each.name for each in found if each.name not in self._by_name]

    def reserve(self, root: Digest, parent: Digest, head: EntryHead) -> Reservation | None:
        """Add an entry in a pending extent. See `DiskStore.reserve`."""
        with self.changed:
            above = self._records.get(parent)
            has_place = parent == root or (above is not None and above.extent.root == root)
            if not has_place or head.block_hash in self._records:
                return None
            if head.n_bytes > min(self.room, self.path_room(parent)):
                return None
            extent = CatalogExtent(root, parent, n_bytes=head.n_bytes)
            self.n_bytes += head.n_bytes
            self._link(extent)
            self._append(extent, parent, head)
            if parent == root or above is None or above.extent.name:
                extent.used_ns = self._latest_ns = now_ns = self._now_ns()
                self._use(self._above(extent), now_ns + 1)
            else:  # what is above was used when that was reserved
                extent.used_ns = above.extent.used_ns - 1
            return Reservation(extent, head)

    def write(self, reservation: Reservation, parts: Sequence[Buffer | None]) -> bool:
        """Queue a pending extent with its bytes. See `DiskStore.write`."""
        extent, head = reservation
        wanted = (
            None if size is None else part for part, size in zip(parts, head.sizes, strict=True)
        )
        entry = Entry(head.block_hash, head.n_tokens, tuple(wanted))
        if entry.sizes != head.sizes:
            raise ValueError(f"parts of {entry.sizes} bytes where {head.sizes} were reserved")
        with self.changed:
            if not extent.is_removed:
                extent.entries = (entry,)
                self.queue[extent] = monotonic()
                self.changed.notify_all()
            return not extent.is_removed

    def take_queued(self, most_bytes: int) -> CatalogExtent:
        """The first extent of the queue, joined with those that continue it, as far as one file is
        to hold. An entry of fewer tokens than its parent has nothing below it, so it does not take
        the place of what has.
        """
        with self.changed:
            extent, _ = self.queue.popitem(last=False)
            extent.entries = entries = list(extent.entries)
            while after := [
                it
                for it in self._below.get(entries[-1].block_hash, ())
                if it in self.queue
                and it.first_tokens == entries[-1].n_tokens
                and extent.n_bytes + it.n_bytes <= most_bytes
            ]:
                del self.queue[after[0]]
                self._discard(after[0])
                self._records[after[0].hashes[0]].extent = extent
                extent.hashes += after[0].hashes
                extent.n_bytes += after[0].n_bytes
                entries += after[0].entries
            return extent

    def publish(self, extent: CatalogExtent, name: str, header: ExtentHeader) -> bool:
        """The extent is in the file `name`. False if it has been removed meanwhile."""
        with self.changed:
            if extent.is_removed:
                return False
            self._is_in(extent, name)
            self._give_back(extent)
            for entry in header.entries:  # readable from here on, without the lock
                self._records[entry.block_hash].head = entry
            return True

    def touch(self, block_hash: Digest) -> None:
        """An entry has been used, and with it all that is above it."""
        with self.changed:
            record = self._records.get(block_hash)
            if record is not None:
                self._use(self._path(record.extent), self._now_ns())

    def take_touched(self) -> list[CatalogExtent]:
        """The written extents that have been used since the last call."""
        with self.changed:
            touched = [extent for extent in self._touched if extent.name]
            self._touched.difference_update(touched)
            return touched

    def take_doomed(self) -> list[str]:
        """The files to be deleted that were not taken before."""
        with self.changed:
            doomed, self.doomed = self.doomed, []
            return doomed

    def remove(self, extents: Collection[CatalogExtent]) -> int:
        """Remove extents and all that hangs from them: from the catalog now, from the disk soon.
        Returns how many entries that takes away.
        """
        with self.changed:
            removed = [extent for extent in extents if not extent.is_removed]
            seen = set(removed)
            for extent in removed:  # grows during the walk
                below = set[CatalogExtent]()
                for block_hash in extent.hashes:
                    below |= self._below.get(block_hash, set())
                removed += below - seen
                seen |= below
            for extent in removed:
                self._unlink(extent)
            self.changed.notify_all()
            return sum(len(extent.hashes) for extent in removed)

    def clear(self, root: Digest | None) -> None:
        """Remove a namespace, or all."""
        with self.changed:
            roots = list(self._by_root) if root is None else [root]
            self.remove([extent for each in roots for extent in self._by_root.get(each, ())])

    def clear_slowly(self, root: Digest | None) -> None:
        """Remove a namespace, or all, CLEARED_AT_ONCE extents at a time, the leaves first. Other
        threads go on meanwhile, and may add to it.
        """
        extents = self._parents_first(root)
        while extents:
            self.remove(extents[-CLEARED_AT_ONCE:])
            del extents[-CLEARED_AT_ONCE:]

    def problems(self) -> Iterator[str]:
        """Violations of the invariants. For tests."""
        with self.changed:
            for block_hash, record in self._records.items():
                if record.head.block_hash != block_hash or block_hash not in record.extent.hashes:
                    yield "an extent does not know its entry"
            extents = list(chain.from_iterable(self._by_root.values()))
            for extent in extents:
                if extent.is_removed or extent not in self._below[extent.parent]:
                    yield "an extent that is not below its parent"
                if extent.parent != extent.root and extent.parent not in self._records:
                    yield "an extent without its parent"
                n_bytes = 0 if extent.parent == extent.root else self._path_bytes(extent.parent)
                for block_hash in extent.hashes:
                    n_bytes += self._records[block_hash].head.n_bytes
                    if self._path_bytes(block_hash) != n_bytes:
                        yield "a path of another size"
                if any(it.used_ns <= extent.used_ns for it in self._above(extent)):
                    yield "an extent was used later than one above it"
            below = sum(map(len, self._below.values()))
            written = sum(record.is_written for record in self._records.values())
            pending = sum(extent.n_bytes for extent in extents)
            if (below, written, pending) != (len(extents), self._n_written, self.n_bytes):
                yield "counts that differ"
            yield from self._problems_of_written([it for it in extents if it.name])

    def _parents_first(self, root: Digest | None) -> list[CatalogExtent]:
        """The extents of a namespace, or of all, each after what it hangs from. What is changed
        meanwhile may be missing: the lock is not held.
        """
        roots = tuple(self._by_root) if root is None else (root,)
        found = [extent for each in roots for extent in tuple(self._below.get(each, ()))]
        for extent in found:  # grows during the walk
            for block_hash in tuple(extent.hashes):
                found += tuple(self._below.get(block_hash, ()))
        return found

    # All below holds the lock.

    def _problems_of_written(self, written: Sequence[CatalogExtent]) -> Iterator[str]:
        if self._by_name != {extent.name: extent for extent in written}:
            yield "an extent with another name"
        lengths = defaultdict[Digest, Counter[int]](Counter)
        for extent in written:
            lengths[extent.parent][extent.first_tokens] += 1
        if lengths != self._lengths:
            yield "other lengths below an entry"

    def _now_ns(self) -> int:
        """The time of a use, later than any before: the clock may be set back."""
        return max(int(self._clock() * 1e9), self._latest_ns + 1)

    def _path_bytes(self, block_hash: Digest) -> int:
        """The bytes of an entry and its ancestors; 0 for a root or an unknown hash."""
        record = self._records.get(block_hash)
        return record.path_bytes if record else 0

    def _load(self, found: FoundExtent) -> bool:
        """Whether the extent adds something."""
        root, parent, entries, _ = found.header
        if any(entry.block_hash in self._records for entry in entries):
            return False
        extent = CatalogExtent(root, parent)
        extent.used_ns = found.used_ns
        self._latest_ns = max(self._latest_ns, found.used_ns)
        self._link(extent)
        for entry in entries:
            self._append(extent, parent, entry)
            parent = entry.block_hash
        self._is_in(extent, found.name)
        return True

    def _link(self, extent: CatalogExtent) -> None:
        self._by_root[extent.root].add(extent)
        self._below[extent.parent].add(extent)

    def _is_in(self, extent: CatalogExtent, name: str) -> None:
        """The extent can be read from the file `name`."""
        extent.name = name
        self._by_name[name] = extent
        self._lengths[extent.parent][extent.first_tokens] += 1
        self._n_written += len(extent.hashes)

    def _append(self, extent: CatalogExtent, parent: Digest, head: EntryHead) -> None:
        extent.hashes.append(head.block_hash)
        extent.first_tokens = extent.first_tokens or head.n_tokens
        path_bytes = 0 if parent == extent.root else self._records[parent].path_bytes
        self._records[head.block_hash] = Record(extent, head, path_bytes + head.n_bytes)

    def _above(self, extent: CatalogExtent) -> Iterator[CatalogExtent]:
        """The extents that an extent hangs from, the nearest first."""
        if extent.parent != extent.root:
            yield from self._path(self._records[extent.parent].extent)

    def _path(self, extent: CatalogExtent) -> Iterator[CatalogExtent]:
        """The extents from this one up to its root. A file may claim that a root is an entry of
        another namespace; the path ends there all the same.
        """
        yield extent
        while extent.parent != extent.root:
            extent = self._records[extent.parent].extent
            yield extent

    def _use(self, path: Iterable[CatalogExtent], now_ns: int) -> None:
        """Note that these were used, each a nanosecond after the one below it."""
        for extent in path:
            if extent.used_ns >= now_ns:
                break
            extent.used_ns = now_ns
            self._latest_ns = max(self._latest_ns, now_ns)
            self._touched.add(extent)
            now_ns += 1

    def _give_back(self, extent: CatalogExtent) -> None:
        """The extent is not pending any more."""
        self.n_bytes -= extent.n_bytes
        extent.n_bytes = 0

    def _discard(self, extent: CatalogExtent) -> None:
        self._touched.discard(extent)
        for index, key in ((self._by_root, extent.root), (self._below, extent.parent)):
            index[key].discard(extent)
            if not index[key]:
                del index[key]

    def _unlink(self, extent: CatalogExtent) -> None:
        extent.is_removed = True
        self._discard(extent)
        self._give_back(extent)
        if self.queue.pop(extent, None) is not None:
            extent.entries = ()
        if extent.name:
            self.doomed.append(extent.name)
            self._is_gone(extent)
        for block_hash in extent.hashes:
            self._n_written -= self._records.pop(block_hash).is_written

    def _is_gone(self, extent: CatalogExtent) -> None:
        """The file of the extent is not read any more."""
        del self._by_name[extent.name]
        lengths = self._lengths[extent.parent]
        lengths[extent.first_tokens] -= 1
        if not lengths[extent.first_tokens]:
            del lengths[extent.first_tokens]
        if not lengths:
            del self._lengths[extent.parent]
