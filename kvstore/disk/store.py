"""KV on disk, which survives eviction from the arena and restarts.

It knows block hashes and bytes. Its user decides what to write and when to read.
docs/internals/disk-tier.md describes it.
"""

import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvstore.disk.catalog import Catalog, FoundExtent, Reservation
from kvstore.disk.extent import SUFFIX, DamagedHeader, OsFiles, parse, read_header
from kvstore.disk.folder import (
    EXTENTS,
    LOCK,
    DailyBudget,
    fingerprint_of,
    folders,
    is_open,
    joined,
    keep_out_of_backups,
    model_of,
    new_daemon,
    remove_old_formats,
    take_folder,
    wrap_errors,
)
from kvstore.disk.reader import Deliver, Readers, Ticket
from kvstore.disk.space import Space
from kvstore.disk.types import (
    Buffer,
    DiskCounters,
    DiskError,
    DiskLimits,
    DiskStats,
    EntryHead,
    Fault,
    fault_of,
)
from kvstore.disk.writer import Writer
from kvstore.tokens import Digest

logger = logging.getLogger(__name__)


class DiskStore:
    """One directory, open for the KV of one model. Any thread may call its methods; none but
    `flush` and `close` waits for the disk.
    """

    def __init__(
        self,
        held: ExitStack,
        catalog: Catalog,
        space: Space,
        counters: DiskCounters,
        writer: Writer,
        readers: Readers,
    ) -> None:
        """`held` has the locks, which are released when the store is closed."""
        self._held = held
        self._counters = counters
        self._catalog = catalog
        self._space = space
        self._writer = writer
        self._readers = readers
        self._is_closed = False
        writer.start()
        readers.start()

    @classmethod
    def open(
        cls,
        directory: Path,
        fingerprint: str,
        limits: DiskLimits,
        files: OsFiles | None = None,
        clock: Callable[[], float] = time.time,
        daemon: str = "",
        model: str = "",
    ) -> "DiskStore":
        """Open the directory for the model and format that `fingerprint` names. `model` is its
        name, for `du`.

        Stores with the same `daemon` name share the directory, its limit and its daily budget;
        without a name the directory is exclusive. A directory that holds more than its limit
        shrinks before this returns. Raises DiskError when another daemon has it or it cannot be
        used.
        """
        files = files or OsFiles()
        with ExitStack() as held, wrap_errors(directory), collector_paused():
            lock = held.enter_context(joined(directory, daemon or new_daemon()))
            keep_out_of_backups(directory)
            counters, catalog = DiskCounters(), Catalog(limits.buffer_bytes, clock)
            with lock:
                remove_old_formats(directory, files)
                folder, own = take_folder(directory, fingerprint, model)
                held.callback(own.close)
                found, damaged = _read_headers(files, folder)
                counters.faults.update(damaged.values())
                for name in (*damaged, *catalog.load(found)):
                    _remove(files, folder / name)
            space = Space(files, directory, folder, limits, catalog, clock)
            budget = DailyBudget(files, directory, limits.daily_bytes, clock)
            writer = Writer(catalog, space, budget, lock, limits, counters)
            writer.turn()
            readers = Readers(catalog, space, limits, counters)
            return cls(held.pop_all(), catalog, space, counters, writer, readers)

    def known(self, hashes: Sequence[Digest]) -> int:
        """The number of leading entries of a path that can be read."""
        return self._catalog.known(hashes)

    def held(self, hashes: Sequence[Digest]) -> int:
        """The number of leading entries of a path that are stored, pending or reserved."""
        return self._catalog.held(hashes)

    def entry(self, block_hash: Digest) -> EntryHead | None:
        """The record of an entry that can be read."""
        record = self._catalog.get(block_hash)
        return record.head if record is not None and record.is_written else None

    def held_entry(self, block_hash: Digest) -> EntryHead | None:
        """The record of an entry that is stored, pending or reserved."""
        record = self._catalog.get(block_hash)
        return None if record is None else record.head

    def lengths_below(self, block_hash: Digest) -> frozenset[int]:
        """The lengths in tokens of the readable entries right below this entry or root, as far as
        they are shorter than a block; some of whole blocks, too.
        """
        return self._catalog.lengths_below(block_hash)

    def roots(self) -> frozenset[Digest]:
        """The roots of the namespaces with stored or pending entries."""
        return self._catalog.roots()

    @property
    def room(self) -> int:
        """Bytes that can be reserved now: none when today's budget is spent or the disk is full,
        and for a while after it has failed.
        """
        return self._catalog.room

    @property
    def is_idle(self) -> bool:
        """Whether nothing is reserved or pending, so that waiting frees no space."""
        return not self._catalog.n_bytes

    def path_room(self, block_hash: Digest) -> int:
        """Bytes that a path may still take below this entry, which may be a reserved one, or below
        this root. A longer path would push its own beginning out.
        """
        return self._catalog.path_room(block_hash)

    def reserve(self, root: Digest, parent: Digest, head: EntryHead) -> Reservation | None:
        """Reserve room for an entry below `parent`: another entry, or the root of its namespace. It
        counts as `held` at once.

        None where it is `held`, or where there is no room, no `path_room`, or no parent. Each
        reservation ends with one call of `write`, after those of its ancestors, or of `cancel`.
        """
        return self._catalog.reserve(root, parent, head)

    def write(self, reservation: Reservation, parts: Sequence[Buffer | None]) -> bool:
        """Hand over the parts of a reserved entry, which must not change afterwards. Parts that
        were not reserved are not written.

        False where the reservation has been removed meanwhile, with its parent or by a clear.
        Accepted parts may still be lost, with all entries below. Raises ValueError for parts of
        other sizes than were reserved.
        """
        return self._catalog.write(reservation, parts)

    def cancel(self, reservation: Reservation) -> None:
        """Give a reservation back. What hangs from it is removed."""
        self._catalog.remove([reservation.extent])

    def read(self, hashes: Sequence[Digest], deliver: Deliver) -> Ticket:
        """Read these entries, root to leaf. A reader thread delivers them in runs, in order.

        It ends when as many entries have been delivered as there are hashes, or with a ReadFailure.
        Tell the ticket what has been `consumed`: no more than `read_ahead_bytes` are read ahead, or
        the bytes of its last `keep_ahead`.
        """
        return self._readers.read(hashes, deliver)

    def touch(self, hashes: Sequence[Digest]) -> None:
        """A path was used in memory, so it is as recently used on disk."""
        if n_known := self._catalog.known(hashes):
            self._catalog.touch(hashes[n_known - 1])

    def forget(self, block_hash: Digest) -> None:
        """Remove the extent that has an entry, if there is one, and all below it."""
        if (record := self._catalog.get(block_hash)) is not None:
            self._catalog.remove([record.extent])

    def clear(self, root: Digest | None = None) -> None:
        """Remove a namespace, or all. Not readable any more when this returns, and deleted with the
        next `flush`.
        """
        self._catalog.clear(root)

    def clear_slowly(self, root: Digest | None = None) -> None:
        """Clear all that is there now, while other threads read and write. A `clear` after it has
        little to do. This thread waits for neither the disk nor them.
        """
        self._catalog.clear_slowly(root)

    def upkeep(self) -> None:
        """Measure, shrink and record recency now, as happens every ten seconds."""
        self._writer.upkeep()

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until the operating system has all that was accepted. False if that took longer."""
        return self._writer.flush(timeout)

    @property
    def read_rate(self) -> float | None:
        """Bytes a second that were recently read and verified; None before anything was."""
        return self._readers.read_rate

    def stats(self) -> DiskStats:
        return DiskStats(
            counters=self._counters.copy(),
            entries=len(self._catalog),
            used_bytes=self._space.own_bytes,
            shared_bytes=self._space.used_bytes,
            buffered_bytes=self._catalog.n_bytes,
            read_rate=self._readers.read_rate,
            write_fault=self._writer.fault,
            is_day_spent=self._writer.is_day_spent,
            ended_threads=() if self._is_closed else self._ended_threads(),
        )

    def problems(self) -> Iterator[str]:
        """Contradictions in memory. For tests."""
        return self._catalog.problems()

    def close(self) -> None:
        """Drop queued writes, finish the current one, and end all reads without notice."""
        self._is_closed = True
        self._writer.close()
        self._readers.close()
        self._held.close()

    def _ended_threads(self) -> tuple[str, ...]:
        writer = () if self._writer.is_alive else ("disk-writer",)
        return writer + self._readers.ended


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause garbage collection while many live objects are created."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(frozen=True, slots=True)
class FolderUse:
    """One model's folder. `allocated_bytes` is the size as `du` counts it."""

    folder: Path
    model: str  # its name; empty where it is not known
    fingerprint: str
    n_extents: int
    allocated_bytes: int


@dataclass(frozen=True, slots=True)
class FolderCheck:
    """The result of reading a whole folder.

    `damaged`: the hashes of entries whose bytes are not what was written, and the names of files
    with a damaged header. `orphans`: extents whose parents are missing. The daemon drops both when
    it reads them.
    """

    folder: Path
    model: str  # its name; empty where it is not known
    fingerprint: str
    entries: int
    n_bytes: int
    damaged: tuple[str, ...]
    orphans: int

    @property
    def is_sound(self) -> bool:
        return not self.damaged and not self.orphans


def du(directory: Path) -> list[FolderUse]:
    """The size of each model, also while a daemon runs. Raises DiskError."""
    with wrap_errors(directory):
        return [_use_of(folder) for folder in _folders_in(directory)]


def verify(directory: Path) -> Iterator[FolderCheck]:
    """Read everything and change nothing. Raises DiskError, also while a daemon runs."""
    with _alone(directory):
        for folder in _folders_in(directory):
            yield _check(folder)


def clear(directory: Path) -> int:
    """Remove all that is stored, of all models. Returns how many bytes of disk that frees. Raises
    DiskError, also while a daemon runs.
    """
    with _alone(directory):
        found = du(directory)
        for use in found:
            OsFiles().remove(use.folder)
        return sum(use.allocated_bytes for use in found)


def clear_unopened(directory: Path, daemon: str, fingerprint: str = "") -> int:
    """Remove the folders that no process has open, of all models or of those whose fingerprint
    begins with `fingerprint`. Processes of the same `daemon` may have other folders open. Returns
    how many bytes of disk that frees. Raises DiskError where another daemon has the directory.
    """
    if not directory.is_dir():
        return 0
    with wrap_errors(directory), joined(directory, daemon) as lock, lock:
        uses = (_use_of(folder) for folder in folders(directory) if not is_open(folder))
        found = [use for use in uses if use.fingerprint.startswith(fingerprint)]
        for use in found:
            OsFiles().remove(use.folder)
    return sum(use.allocated_bytes for use in found)


def _read_headers(files: OsFiles, folder: Path) -> tuple[list[FoundExtent], dict[str, Fault]]:
    """The valid extents of a folder, and the names of damaged ones with their faults. What cannot
    be read for lack of memory or descriptors is skipped.
    """
    found, damaged = list[FoundExtent](), dict[str, Fault]()
    for use in files.scan(folder):
        if not EXTENTS.fullmatch(use.name):
            continue
        try:
            header = read_header(files, folder / use.name)
        except DamagedHeader:
            damaged[use.name] = Fault.HEADER
        except (OSError, MemoryError) as error:
            logger.warning("disk cache: %s cannot be read: %s", folder / use.name, error)
            if (fault := fault_of(error)) is not Fault.RESOURCES:
                damaged[use.name] = fault
        else:
            if use.size < header.end:
                damaged[use.name] = Fault.SHORT_READ
            else:
                found.append(FoundExtent(use.name, use.used_ns, header))
    return found, damaged


def _remove(files: OsFiles, path: Path) -> None:
    """Remove a file without a use, if that is possible."""
    try:
        files.remove(path)
    except OSError as error:
        logger.warning("disk cache: %s cannot be removed: %s", path, error)


def _use_of(folder: Path) -> FolderUse:
    found = OsFiles().scan(folder)
    n_extents = sum(use.name.endswith(SUFFIX) for use in found)
    n_bytes = sum(use.n_bytes for use in found)
    return FolderUse(folder, model_of(folder), fingerprint_of(folder), n_extents, n_bytes)


def _check(folder: Path) -> FolderCheck:
    files, catalog = OsFiles(), Catalog(0, time.time)
    found, damaged = _read_headers(files, folder)
    orphans = catalog.load(found)
    unsound, n_bytes = list(damaged), 0
    for name, _, header in found:
        if name in orphans:
            continue
        for entry in header.entries:
            n_bytes += entry.n_bytes
            if parse(entry, files.read(folder / name, entry.offset, entry.n_bytes)) is None:
                unsound.append(entry.block_hash.hex())
    names = folder, model_of(folder), fingerprint_of(folder)
    return FolderCheck(*names, len(catalog), n_bytes, tuple(unsound), len(orphans))


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    with wrap_errors(directory):
        _folders_in(directory)
        with joined(directory, new_daemon()):
            yield


def _folders_in(directory: Path) -> list[Path]:
    found = folders(directory) if directory.is_dir() else []
    if not found and not (directory / LOCK).is_file():
        raise DiskError(f"there is no disk cache in {directory}")
    return found
