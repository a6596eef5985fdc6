"""All records in memory, as a forest below the namespaces' roots, and by segment.

Look-ups are single dictionary reads, so any thread makes them without waiting. What changes the
catalog holds its lock. A record's parent is a root or has a record.
"""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvstore.tier.record import Record
from kvstore.tokens import Digest


@dataclass(eq=False, slots=True)
class SegmentUse:
    """The records of one segment. `last_used` is that of the latest it has ever had."""

    records: set[Record] = field(default_factory=set)
    last_used: float = 0.0


class Catalog:
    """See the module."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._records: dict[Digest, Record] = {}
        self._children: dict[Digest, set[Record]] = {}
        self._segments: dict[int, SegmentUse] = {}
        self._touched: set[Record] = set()
        self._used: set[int] = set()

    def __len__(self) -> int:
        return len(self._records)

    def get(self, block_hash: Digest) -> Record | None:
        return self._records.get(block_hash)

    def known(self, hashes: Sequence[Digest]) -> int:
        """How many of the hashes, from the first on, have records."""
        records = self._records
        for count, block_hash in enumerate(hashes):
            if block_hash not in records:
                return count
        return len(hashes)

    def lengths_below(self, block_hash: Digest) -> frozenset[int]:
        """Of how many tokens the entries right below are."""
        with self._lock:
            return frozenset(record.n_tokens for record in self._children.get(block_hash, ()))

    def path_bytes(self, block_hash: Digest) -> int:
        """Of an entry and all that it hangs from; none of a root, and of what is not there."""
        record = self._records.get(block_hash)
        return record.path_bytes if record else 0

    def has_place(self, root: Digest, parent: Digest) -> bool:
        """Whether something below this parent would be no orphan."""
        record = self._records.get(parent)
        return parent == root or (record is not None and record.root == root)

    def records(self) -> tuple[Record, ...]:
        with self._lock:
            return tuple(self._records.values())

    def roots(self) -> frozenset[Digest]:
        """Of all namespaces that have records."""
        with self._lock:
            return frozenset(record.root for record in self._records.values())

    def segments(self) -> dict[int, int]:
        """Of each segment, how many records it has; none where all have gone."""
        with self._lock:
            return {number: len(use.records) for number, use in self._segments.items()}

    def fill(self, records: Sequence[Record]) -> list[Record]:
        """Take what the index holds, in the order of keys; returns what is no use: what another
        record has replaced, orphans, and whatever hangs in the air.
        """
        with self._lock:
            latest = {record.block_hash: record for record in records}
            useless = list[Record]()
            if len(latest) < len(records):
                useless = [it for it in records if latest[it.block_hash] is not it]
            waiting = list(latest.values())
            while waiting:  # once, or as often as a parent was written again after its child
                above = waiting
                waiting = [record for record in above if not self._hang(record)]
                if len(waiting) == len(above):
                    break
            for record in reversed(tuple(self._records.values())):  # children before parents
                parent = self._records.get(record.parent)
                if parent is not None and parent.last_used < record.last_used:
                    self._use(parent, record.last_used)
            return useless + waiting

    def add(self, records: Sequence[Record]) -> list[Record]:
        """Returns those of them that are no use: what they replace, and orphans."""
        with self._lock:
            useless = list[Record]()
            for record in records:
                old = self._records.get(record.block_hash)
                if not self._hang(record):
                    useless.append(record)
                    continue
                if old is not None:
                    self._lengthen_below(record, record.path_bytes - old.path_bytes)
                    self._displace(old)
                    useless.append(old)
                self._touch(record.parent, record.last_used)
            return useless

    def touch(self, block_hash: Digest, now: float) -> None:
        """It has been used, and with it all that it hangs from."""
        with self._lock:
            self._touch(block_hash, now)

    def take_touched(self) -> list[Record]:
        """What has been used since the last call and still is there."""
        with self._lock:
            touched, self._touched = self._touched, set()
            return [record for record in touched if self._records.get(record.block_hash) is record]

    def take_used(self) -> dict[int, float]:
        """The segments of which something has been used since the last call, and when."""
        with self._lock:
            used, self._used = self._used, set()
            there = used & self._segments.keys()
            return {number: self._segments[number].last_used for number in there}

    def last_used(self, number: int) -> float:
        """When something of a segment was used last; 0 of one that is not there."""
        use = self._segments.get(number)
        return use.last_used if use else 0.0

    def remove(self, record: Record) -> list[Record]:
        """It and all below it, unless it has gone already."""
        with self._lock:
            return self._remove([record]) if self._records.get(record.block_hash) is record else []

    def remove_namespace(self, root: Digest) -> list[Record]:
        with self._lock:
            return self._remove(list(self._children.get(root, ())))

    def remove_segment(self, number: int) -> list[Record]:
        """All that stands in it, and what is below that elsewhere."""
        with self._lock:
            use = self._segments.pop(number, None)
            return self._remove(list(use.records)) if use else []

    def clear(self) -> list[Record]:
        with self._lock:
            return self._remove(list(self._records.values()))

    def coldest_segment(self, but: int) -> int | None:
        """The one whose records were last used longest ago; `but` is that only if it is alone."""
        with self._lock:
            numbers = [number for number in self._segments if number != but] or self._segments
            return min(numbers, key=lambda it: (self._segments[it].last_used, it), default=None)

    def forget_segment(self, number: int) -> None:
        """Its file has gone, and it had no records."""
        with self._lock:
            self._segments.pop(number, None)

    def problems(self) -> Iterator[str]:
        """What does not add up."""
        with self._lock:
            for key, record in self._records.items():
                if key != record.block_hash or not self.has_place(record.root, record.parent):
                    yield "a record hangs in the air"
                if record not in self._children.get(record.parent, ()):
                    yield "a parent does not know its child"
                if record not in self._segments[record.segment].records:
                    yield "a segment does not know its record"
                parent = self._records.get(record.parent)
                above_bytes = parent.path_bytes if parent is not None else 0
                if record.path_bytes != above_bytes + record.n_bytes:
                    yield "a path is not as long as its entries"
                if parent is not None and parent.last_used < record.last_used:
                    yield "a child was used after its parent"
            if sum(map(len, self._children.values())) != len(self._records):
                yield "there are children without records"
            if sum(len(use.records) for use in self._segments.values()) != len(self._records):
                yield "there are records in segments alone"

    def _hang(self, record: Record) -> bool:
        """Whether its parent was there to hang it from."""
        above = self._records.get(record.parent)
        if record.parent == record.root:
            record.path_bytes = record.n_bytes
        elif above is not None and above.root == record.root:
            record.path_bytes = above.path_bytes + record.n_bytes
            record.parent, record.root = above.block_hash, above.root  # one copy is enough
        else:
            return False
        self._records[record.block_hash] = record
        siblings = self._children.get(record.parent)
        if siblings is None:
            self._children[record.parent] = {record}
        else:
            siblings.add(record)
        use = self._segments.get(record.segment)
        if use is None:
            use = self._segments[record.segment] = SegmentUse()
        use.records.add(record)
        use.last_used = max(use.last_used, record.last_used)
        self._used.add(record.segment)
        return True

    def _lengthen_below(self, record: Record, n_bytes: int) -> None:
        """Add to the path of every descendant, because the record is n_bytes larger than before."""
        if not n_bytes:
            return
        descendants = list(self._children.get(record.block_hash, ()))
        for descendant in descendants:  # grows during the walk
            descendant.path_bytes += n_bytes
            descendants += self._children.get(descendant.block_hash, ())

    def _displace(self, record: Record) -> None:
        siblings = self._children[record.parent]
        siblings.discard(record)
        if not siblings:
            del self._children[record.parent]
        if (use := self._segments.get(record.segment)) is not None:
            use.records.discard(record)

    def _remove(self, records: list[Record]) -> list[Record]:
        doomed, seen = records, set(records)
        for record in doomed:  # it grows while we walk
            below = self._children.get(record.block_hash, set()) - seen
            seen |= below
            doomed += below
        for record in doomed:
            self._displace(record)
            del self._records[record.block_hash]
        return doomed

    def _touch(self, block_hash: Digest, now: float) -> None:
        record = self._records.get(block_hash)
        while record is not None and record.last_used < now:
            self._use(record, now)
            self._touched.add(record)
            record = self._records.get(record.parent)

    def _use(self, record: Record, now: float) -> None:
        record.last_used = now
        use = self._segments[record.segment]
        use.last_used = max(use.last_used, now)
        self._used.add(record.segment)
