"""A tier of KV below the arena, on disk: what was computed once outlives eviction and restart.

It knows block hashes and bytes. Its user decides what the bytes are, what is worth writing and when
reading pays. docs/adr/0014-disk-tier.md has the format and what was measured.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from kvstore.tier.buffer import Removal, Upkeep, WriteBuffer
from kvstore.tier.disk.daily_budget import DailyBudget
from kvstore.tier.disk.files import Files, OsFiles
from kvstore.tier.disk.folder import in_words, join, new_daemon, take_folder, write_lock
from kvstore.tier.disk.others import Others
from kvstore.tier.disk.segments import Segments
from kvstore.tier.disk.space import Space
from kvstore.tier.opening import collector_paused, load_catalog, open_index
from kvstore.tier.reader import Deliver, Readers, Ticket
from kvstore.tier.record import Record
from kvstore.tier.tally import Tally, TierCounters
from kvstore.tier.types import EntryInfo, Extent, TierLimits
from kvstore.tier.writer import Writer
from kvstore.tokens import Digest


@dataclass(frozen=True, slots=True)
class TierStats:
    """`used_bytes` is what this model's folder took when it was last measured, and `shared_bytes`
    what all of the directory did.
    `read_rate` is in bytes a second, None before anything was read. `ended_threads` are those that
    should run and do not: nothing is written, or less is read, until the tier is opened again.
    """

    counters: TierCounters
    entries: int
    used_bytes: int
    shared_bytes: int
    buffered_bytes: int
    read_rate: float | None
    ended_threads: tuple[str, ...] = ()


class DiskTier:
    """One directory, open for one model's fingerprint. Any thread may call its methods; none but
    `flush` and `close` waits for the disk.
    """

    def __init__(self, held: ExitStack, writer: Writer, readers: Readers) -> None:
        """`held` are the locks."""
        self._held = held
        self._writer = writer
        self._catalog = writer.catalog
        self._buffer = writer.buffer
        self._readers = readers
        self._writing = threading.Thread(target=writer.run, name="tier-writer", daemon=True)
        self._writing.start()
        readers.start()
        self._is_closed = False

    @classmethod
    def open(
        cls,
        directory: Path,
        fingerprint: str,
        limits: TierLimits,
        files: Files | None = None,
        clock: Callable[[], float] = time.time,
        daemon: str = "",
    ) -> "DiskTier":
        """Tiers of one `daemon`, a name, share the directory, its limit and its day; one without a
        name shares it with nobody. Raises TierError, in words, when another daemon has it or it
        cannot be used.

        A directory that holds more than its limit shrinks before this returns.
        """
        files = files or OsFiles()
        with ExitStack() as undo, in_words(directory), collector_paused():
            held = undo.enter_context(ExitStack())
            lock = write_lock(directory)
            held.callback(lock.release)
            held.callback(join(directory, daemon or new_daemon(), lock).release)
            with lock:
                folder, own = take_folder(directory, fingerprint)
                held.callback(own.release)
                tally = Tally()
                index, records = open_index(files, folder, tally)
                undo.callback(index.close)
                segments = Segments(files, folder, limits.segment_bytes)
                catalog, useless = load_catalog(records, segments, tally)
                writer = Writer(
                    index=index,
                    segments=segments,
                    lock=lock,
                    space=Space(files, directory, folder, limits),
                    others=Others(files, directory, folder),
                    catalog=catalog,
                    buffer=WriteBuffer(catalog, limits.buffer_bytes),
                    budget=DailyBudget(files, directory, limits.daily_bytes, clock),
                    tally=tally,
                    clock=clock,
                    keys=itertools.count(records[-1].key + 1 if records else 1),
                )
                writer.erase(useless)
            writer.alone(writer.keep_up)
            readers = Readers(catalog, segments, limits, tally, _forgetter(writer))
            undo.pop_all()
        return cls(held, writer, readers)

    def known(self, hashes: Sequence[Digest]) -> int:
        """How many of a chain, from the first on, can be read."""
        return self._catalog.known(hashes)

    def held(self, hashes: Sequence[Digest]) -> int:
        """How many of a chain, from the first on, need not be offered: stored or queued."""
        return self._buffer.held(hashes)

    def lacks(self, block_hash: Digest, has: Sequence[bool]) -> bool:
        """Whether an entry that `has` these of its parts brings one that is neither stored nor on
        its way.
        """
        return self._buffer.lacks(block_hash, has)

    def roots(self) -> frozenset[Digest]:
        """The roots of the namespaces of which something is stored or queued."""
        return self._buffer.roots() | self._catalog.roots()  # the way that entries take

    def entry(self, block_hash: Digest) -> EntryInfo | None:
        record = self._catalog.get(block_hash)
        return record.info if record else None

    def lengths_below(self, block_hash: Digest) -> frozenset[int]:
        """Of how many tokens the stored entries are whose parent this is, an entry or a root."""
        return self._catalog.lengths_below(block_hash)

    @property
    def room(self) -> int:
        """Bytes that `offer` would take now: none when the day's budget is spent or the disk is
        full, and for a while after it has failed.
        """
        return self._buffer.room

    @property
    def is_idle(self) -> bool:
        """Whether no entry that was handed over is still to be written: `room` grows no more by
        waiting for it.
        """
        return not self._buffer.n_bytes

    def path_room(self, block_hash: Digest) -> int:
        """Bytes that a path may still take behind this entry, stored or on its way; of a root, a
        path of its namespace. A longer one would push its own beginning out.
        """
        return self._buffer.path_room(block_hash)

    def offer(self, extent: Extent) -> bool:
        """Hand over what is to be written; its buffers are not to change any more.

        False when there is no room, no `path_room`, or when its parent is neither stored nor on its
        way: come again, from the first hash that is not `held`. What was taken may still be lost,
        with all below it. An entry that is stored is written again if it brings more parts, and
        keeps those that it had.
        """
        return self._buffer.put(extent)

    def read(self, hashes: Sequence[Digest], deliver: Deliver) -> Ticket:
        """Read these entries, root to leaf, and deliver them in runs, in order, by a reader thread.

        It ends when as many entries have been delivered as there are hashes, or with a ReadFailure.
        Tell the ticket what has been `consumed`: no more than `read_ahead_bytes` are read ahead, or
        what it is told to `keep_ahead`.
        """
        return self._readers.read(hashes, deliver, self._writer.clock())

    def touch(self, hashes: Sequence[Digest]) -> None:
        """A chain was used in memory: it is as recently used on disk."""
        if n_known := self._catalog.known(hashes):
            self._catalog.touch(hashes[n_known - 1], self._writer.clock())

    def forget(self, block_hash: Digest) -> None:
        """Remove an entry, if it is stored, and all below it."""
        if (record := self._catalog.get(block_hash)) is not None:
            _forgetter(self._writer)(record)

    def clear(self, root: Digest | None = None) -> None:
        """A namespace, or all, and what of it is on its way. Gone from sight when this returns, and
        from the disk with the next `flush`, but for segments that others share.
        """
        self._buffer.revoke(root)
        removed = self._catalog.clear() if root is None else self._catalog.remove_namespace(root)
        self._buffer.order(Removal(removed))

    def upkeep(self) -> None:
        """Do now what is done every ten seconds: shrink on a full disk, note what was used."""
        self._buffer.order(Upkeep())

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until the operating system has all that was handed over; whether it was in time."""
        return self._buffer.wait(timeout)

    def stats(self) -> TierStats:
        tally = self._writer.tally
        return TierStats(
            counters=tally.counters(),
            entries=len(self._catalog),
            used_bytes=self._writer.space.last_own_bytes,
            shared_bytes=self._writer.space.last_used_bytes,
            buffered_bytes=self._buffer.n_bytes,
            read_rate=tally.read_rate,
            ended_threads=() if self._is_closed else self._ended_threads(),
        )

    @property
    def read_rate(self) -> float | None:
        """Bytes a second that were read and checked of late; None before anything was."""
        return self._writer.tally.read_rate

    def problems(self) -> Iterator[str]:
        """What does not add up in memory; for tests."""
        return self._catalog.problems()

    def close(self) -> None:
        """What waits to be written is dropped, what is being written is kept, and readings end
        without a word.
        """
        self._is_closed = True
        self._buffer.close()
        self._writing.join()
        self._readers.close()
        self._writer.close()
        self._held.close()

    def _ended_threads(self) -> tuple[str, ...]:
        writer = () if self._writing.is_alive() else (self._writing.name,)
        return writer + self._readers.ended


def _forgetter(writer: Writer) -> Callable[[Record], None]:
    def forget(record: Record) -> None:
        if removed := writer.catalog.remove(record):
            writer.buffer.order(Removal(removed))

    return forget
