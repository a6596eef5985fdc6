"""The in-memory catalog of stored and pending data: entries by hash, and the tree of extents.

An extent is *pending* from when room is reserved for its first entry until its file has its name.
Look-ups are a few dictionary reads, which any thread makes without waiting. Changes hold the lock
of the catalog. Two invariants: the parent of an entry is a root or has a record, and an extent that
others hang from was used later than they were, so the coldest one has nothing below it.

Nothing but `load` and `problems` looks at all extents: there may be a hundred thousand.

Parts that are added to an entry later, such as a recurrent state, stand in an extent of their own,
a *supplement*. It can be evicted alone, and goes when the entry does.
"""

import heapq
import threading
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, count, islice
from typing import NamedTuple

from kvstore.disk.extent import ExtentHeader
from kvstore.disk.types import EntryHead
from kvstore.tokens import Digest


@dataclass(eq=False, slots=True)
class CatalogExtent:
    """A run of entries in one file, which is called `name` once it is written.

    `used_ns`: when it was last used, in nanoseconds of Unix time; `first_tokens`: the length in
    tokens of the entry with which it begins.
    """

    root: Digest
    parent: Digest
    is_supplement: bool = False
    hashes: list[Digest] = field(default_factory=list)
    used_ns: int = 0
    name: str = ""
    first_tokens: int = 0
    is_removed: bool = False


@dataclass(eq=False, slots=True)
class Piece:
    """Some of an entry's parts, all in one extent."""

    extent: CatalogExtent
    head: EntryHead

    @property
    def is_written(self) -> bool:
        return bool(self.head.checksum)


@dataclass(eq=False, slots=True)
class Record:
    """An entry. `pieces[0]` is of the extent that continues the path; supplements follow.

    `path_bytes`: of the path from the root to this entry, without supplements.
    """

    parent: Digest
    path_bytes: int
    pieces: list[Piece]

    @property
    def is_written(self) -> bool:
        return self.pieces[0].is_written

    @property
    def written(self) -> list[Piece]:
        """The pieces that can be read."""
        return [piece for piece in self.pieces if piece.is_written]

    @property
    def head(self) -> EntryHead:
        """The parts that can be read."""
        first = self.pieces[0].head
        return EntryHead(first.block_hash, first.n_tokens, _sizes(self.written))


class Reservation(NamedTuple):
    """Room for an entry, or for its missing parts, whose bytes follow later.

    `extent` is pending and has this one entry. It is removed when its parent is.
    """

    extent: CatalogExtent
    head: EntryHead


class FoundExtent(NamedTuple):
    """An extent in a folder: the name of its file, its mtime in nanoseconds, and its header."""

    name: str
    used_ns: int
    header: ExtentHeader

    @property
    def is_supplement(self) -> bool:
        """Whether it adds parts to an entry: only that lacks the block itself."""
        return self.header.entries[0].sizes[0] is None


class Catalog:
    """See the module."""

    def __init__(self) -> None:
        self.latest_ns = 0  # when anything was last used
        self._lock = threading.Lock()
        self._records: dict[Digest, Record] = {}
        self._by_root: defaultdict[Digest, set[CatalogExtent]] = defaultdict(set)
        self._by_name: dict[str, CatalogExtent] = {}  # those that have been written
        self._below: defaultdict[Digest, set[CatalogExtent]] = defaultdict(set)  # by their parent
        self._lengths: defaultdict[Digest, Counter[int]] = defaultdict(Counter)
        self._by_use: list[tuple[int, int, CatalogExtent]] = []  # a heap; see `coldest`
        self._serials = count()
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

    def missing(self, head: EntryHead) -> EntryHead | None:
        """The entry with its parts that are neither stored nor pending; None if there are none."""
        record = self._records.get(head.block_hash)
        if record is None:
            return head
        known = _sizes(list(record.pieces))
        sizes = tuple(
            None if there is not None else size
            for size, there in zip(head.sizes, known, strict=False)
        )
        if all(size is None for size in sizes):
            return None
        return EntryHead(head.block_hash, head.n_tokens, sizes)

    def path_bytes(self, block_hash: Digest) -> int:
        """The bytes of an entry and its ancestors; 0 for a root or an unknown hash."""
        record = self._records.get(block_hash)
        return record.path_bytes if record else 0

    def parent_exists(self, root: Digest, parent: Digest) -> bool:
        """Whether `parent` is the root, or an entry of that namespace."""
        record = self._records.get(parent)
        return parent == root or (record is not None and record.pieces[0].extent.root == root)

    def lengths_below(self, block_hash: Digest) -> frozenset[int]:
        """The lengths in tokens of the readable entries with which an extent below this hash
        begins. Entries shorter than a block always begin one.
        """
        with self._lock:
            return frozenset(self._lengths.get(block_hash, ()))

    def roots(self) -> frozenset[Digest]:
        """The roots of all namespaces that have an extent."""
        with self._lock:
            return frozenset(self._by_root)

    def named(self, name: str) -> CatalogExtent | None:
        """The extent that is in the file of this name."""
        return self._by_name.get(name)

    def coldest(self) -> CatalogExtent | None:
        """The written extent that was used longest ago. O(log n) amortised.

        Each written extent has one place in the heap, with a use that may be outdated; a removed
        one keeps its place until it is the first.
        """
        with self._lock:
            while self._by_use:
                used_ns, serial, extent = self._by_use[0]
                if extent.is_removed:
                    heapq.heappop(self._by_use)
                elif used_ns != extent.used_ns:
                    heapq.heapreplace(self._by_use, (extent.used_ns, serial, extent))
                else:
                    return extent
            return None

    def parents_first(self, root: Digest | None) -> list[CatalogExtent]:
        """The extents of a namespace, or of all, each after what it hangs from. What is changed
        meanwhile may be missing: the lock is not held.
        """
        roots = tuple(self._by_root) if root is None else (root,)
        found = [extent for each in roots for extent in tuple(self._below.get(each, ()))]
        for extent in found:  # grows during the walk
            for block_hash in tuple(extent.hashes):
                found += tuple(self._below.get(block_hash, ()))
        return found

    def hangs_from(self, extent: CatalogExtent, other: CatalogExtent) -> bool:
        """Whether an extent would go if the other one went."""
        with self._lock:
            return any(above is other for above in self._above(extent))

    # Changes.

    def load(self, found: Collection[FoundExtent], now_ns: int) -> list[str]:
        """Take the extents of a folder. Returns the names of the files without a use, because their
        parents are missing or others have the same entries.

        What seems to have been used after `now_ns` was written while the clock was ahead. It was
        used now, in the same order: else it would outlive all that is used from now on.
        """
        later = sorted((each for each in found if each.used_ns > now_ns), key=lambda it: it.used_ns)
        used_ns = {each.name: now_ns + place for place, each in enumerate(later, start=1)}
        found = [each._replace(used_ns=used_ns.get(each.name, each.used_ns)) for each in found]
        with self._lock:
            below = defaultdict[tuple[Digest, Digest], list[FoundExtent]](list)
            supplements = [each for each in found if each.is_supplement]
            for each in found:
                if not each.is_supplement:
                    below[each.header.root, each.header.parent].append(each)
            ready = [it for (root, parent), its in below.items() if root == parent for it in its]
            for each in ready:  # grows during the walk
                if self._load(each):
                    for entry in each.header.entries:
                        ready += below.get((each.header.root, entry.block_hash), ())
            for each in supplements:
                self._load(each)
            self._touched.update(self._by_name[name] for name in used_ns.keys() & self._by_name)
            for extent in reversed(self._by_name.values()):  # what is below before what is above
                self._use(islice(self._above(extent), 1), extent.used_ns + 1)
            return [each.name for each in found if each.name not in self._by_name]

    def reserve(self, root: Digest, parent: Digest, missing: EntryHead, now_ns: int) -> Reservation:
        """Add an entry, or parts that a known one lacks, in a pending extent. Its parent exists."""
        with self._lock:
            extent = CatalogExtent(root, parent, missing.block_hash in self._records)
            self._link(extent)
            self._append(extent, parent, missing)
            above = next(self._above(extent), None)
            if above is None or above.name:
                self._use(self._above(extent), now_ns + 1)
                extent.used_ns = now_ns
                self.latest_ns = max(self.latest_ns, now_ns)
            else:  # what is above was used when that was reserved
                extent.used_ns = above.used_ns - 1
            return Reservation(extent, missing)

    def join(self, extent: CatalogExtent, before: CatalogExtent) -> None:
        """Append the entry of a reservation to the pending extent that ends with its parent."""
        with self._lock:
            [block_hash] = extent.hashes
            self._records[block_hash].pieces[0].extent = before
            before.hashes.append(block_hash)
            self._discard(extent)

    def publish(self, extent: CatalogExtent, name: str, header: ExtentHeader) -> bool:
        """The extent is in the file `name`. False if it has been removed meanwhile."""
        with self._lock:
            if extent.is_removed:
                return False
            self._is_in(extent, name)
            for entry in header.entries:  # readable from here on, without the lock
                pieces = self._records[entry.block_hash].pieces
                next(piece for piece in pieces if piece.extent is extent).head = entry
            return True

    def touch(self, block_hash: Digest, now_ns: int) -> None:
        """An entry has been used, and with it all that is above it."""
        with self._lock:
            record = self._records.get(block_hash)
            if record is not None:
                for piece in record.pieces[1:]:
                    self._use([piece.extent], now_ns)
                self._use(self._path(record.pieces[0].extent), now_ns + 1)

    def take_touched(self) -> list[CatalogExtent]:
        """The written extents that have been used since the last call."""
        with self._lock:
            touched = [extent for extent in self._touched if extent.name]
            self._touched.difference_update(touched)
            return touched

    def remove(self, extents: Collection[CatalogExtent]) -> list[CatalogExtent]:
        """Remove extents, with all that hangs from them. Returns all that were removed."""
        with self._lock:
            removed = [extent for extent in extents if not extent.is_removed]
            seen = set(removed)
            for extent in removed:  # grows during the walk
                if not extent.is_supplement:
                    below = set[CatalogExtent]()
                    for block_hash in extent.hashes:
                        below |= self._below.get(block_hash, set())
                        below |= {it.extent for it in self._records[block_hash].pieces}
                    removed += below - seen
                    seen |= below
            for extent in removed:
                self._unlink(extent)
            return removed

    def remove_namespace(self, root: Digest | None) -> list[CatalogExtent]:
        """Remove all extents of a namespace, or all extents. Returns them."""
        with self._lock:
            roots = list(self._by_root) if root is None else [root]
            extents = list(chain.from_iterable(self._by_root.get(each, ()) for each in roots))
        return self.remove(extents)

    def problems(self) -> Iterator[str]:
        """Violations of the invariants. For tests."""
        with self._lock:
            for block_hash, record in self._records.items():
                extent, above = record.pieces[0].extent, None
                if record.parent != extent.root:
                    above = self._records.get(record.parent)
                path_bytes = record.pieces[0].head.n_bytes + (above.path_bytes if above else 0)
                if record.head.block_hash != block_hash or record.path_bytes != path_bytes:
                    yield "a record does not add up"
                if above is None and record.parent != extent.root:
                    yield "a record without its parent"
                if any(block_hash not in it.extent.hashes for it in record.pieces):
                    yield "an extent does not know its entry"
                if extent.is_supplement or not all(
                    piece.extent.is_supplement for piece in record.pieces[1:]
                ):
                    yield "pieces in the wrong order"
            extents = list(chain.from_iterable(self._by_root.values()))
            for extent in extents:
                if extent.is_removed or extent not in self._below[extent.parent]:
                    yield "an extent that is not below its parent"
                if any(it.used_ns <= extent.used_ns for it in self._above(extent)):
                    yield "an extent was used later than one above it"
            below = sum(map(len, self._below.values()))
            written = sum(record.is_written for record in self._records.values())
            if below != len(extents) or written != self._n_written:
                yield "counts that differ"
            yield from self._problems_of_written([it for it in extents if it.name])

    # All below holds the lock.

    def _problems_of_written(self, written: Sequence[CatalogExtent]) -> Iterator[str]:
        if self._by_name != {extent.name: extent for extent in written}:
            yield "an extent with another name"
        if Counter(it for _, _, it in self._by_use if not it.is_removed) != Counter(written):
            yield "a written extent without its one place in the order of uses"
        lengths = defaultdict[Digest, Counter[int]](Counter)
        for extent in written:
            lengths[extent.parent][extent.first_tokens] += 1
        if lengths != self._lengths:
            yield "other lengths below an entry"

    def _load(self, found: FoundExtent) -> bool:
        """Whether the extent adds something."""
        root, parent, entries, _ = found.header
        if found.is_supplement:
            first = self._records.get(entries[0].block_hash)
            if first is None or first.parent != parent or len(entries) > 1:
                return False
            if len(first.head.sizes) != len(entries[0].sizes):
                return False
        elif any(entry.block_hash in self._records for entry in entries):
            return False
        extent = CatalogExtent(root, parent, found.is_supplement)
        extent.used_ns = found.used_ns
        self.latest_ns = max(self.latest_ns, found.used_ns)
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
        heapq.heappush(self._by_use, (extent.used_ns, next(self._serials), extent))
        self._lengths[extent.parent][extent.first_tokens] += 1
        self._n_written += 0 if extent.is_supplement else len(extent.hashes)

    def _append(self, extent: CatalogExtent, parent: Digest, head: EntryHead) -> None:
        extent.hashes.append(head.block_hash)
        extent.first_tokens = extent.first_tokens or head.n_tokens
        if extent.is_supplement:
            self._records[head.block_hash].pieces.append(Piece(extent, head))
            return
        above = None if parent == extent.root else self._records[parent]
        path_bytes = head.n_bytes + (above.path_bytes if above else 0)
        self._records[head.block_hash] = Record(parent, path_bytes, [Piece(extent, head)])

    def _above(self, extent: CatalogExtent) -> Iterator[CatalogExtent]:
        """The extents that an extent hangs from, the nearest first."""
        key = extent.hashes[0] if extent.is_supplement else extent.parent
        if key != extent.root:
            yield from self._path(self._records[key].pieces[0].extent)

    def _path(self, extent: CatalogExtent) -> Iterator[CatalogExtent]:
        """The extents from this one up to its root, supplements excluded. A file may claim that a
        root is an entry of another namespace; the path ends there all the same.
        """
        yield extent
        while extent.parent != extent.root:
            extent = self._records[extent.parent].pieces[0].extent
            yield extent

    def _use(self, path: Iterable[CatalogExtent], now_ns: int) -> None:
        """Note that these were used, each a nanosecond after the one below it."""
        for extent in path:
            if extent.used_ns >= now_ns:
                break
            extent.used_ns = now_ns
            self.latest_ns = max(self.latest_ns, now_ns)
            self._touched.add(extent)
            now_ns += 1

    def _discard(self, extent: CatalogExtent) -> None:
        self._touched.discard(extent)
        for index, key in ((self._by_root, extent.root), (self._below, extent.parent)):
            index[key].discard(extent)
            if not index[key]:
                del index[key]

    def _unlink(self, extent: CatalogExtent) -> None:
        extent.is_removed = True
        self._discard(extent)
        if extent.name:
            self._is_gone(extent)
        for block_hash in extent.hashes:
            record = self._records.get(block_hash)
            if record is None:
                continue
            if extent.is_supplement:
                record.pieces = [piece for piece in record.pieces if piece.extent is not extent]
            elif record.pieces[0].extent is extent:
                self._n_written -= record.is_written
                del self._records[block_hash]

    def _is_gone(self, extent: CatalogExtent) -> None:
        """The file of the extent is not read any more."""
        del self._by_name[extent.name]
        if len(self._by_use) > 2 * len(self._by_name):
            self._by_use = [place for place in self._by_use if not place[2].is_removed]
            heapq.heapify(self._by_use)
        lengths = self._lengths[extent.parent]
        lengths[extent.first_tokens] -= 1
        if not lengths[extent.first_tokens]:
            del lengths[extent.first_tokens]
        if not lengths:
            del self._lengths[extent.parent]


def _sizes(pieces: Sequence[Piece]) -> tuple[int | None, ...]:
    """The size of each part in the first piece that has it."""
    return tuple(
        next((size for size in each if size is not None), None)
        for each in zip(*(piece.head.sizes for piece in pieces), strict=False)
    )
