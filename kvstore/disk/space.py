"""The space that the directory may take and takes, and the order in which it is freed."""

import heapq
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import NamedTuple

from kvstore.disk.catalog import Catalog
from kvstore.disk.extent import FileUse, OsFiles
from kvstore.disk.folder import EXTENTS, folders, is_open
from kvstore.disk.types import MIB, Buffer, DiskLimits

PATH_SHARE = 0.75
"""The share of the space for entries that one path may take: the end of a longer path would
evict its own beginning.
"""

SPARE_BYTES = MIB + 64 * 1024
"""Left for the folders of models that start, so that nothing is evicted for their sake, and for
what a file takes beyond its payload: its header and its share of the folder."""

SETTLED_NS = 100_000_000
"""File systems count time in ticks of up to 10 ms. A folder that was measured right after it had
changed may change again within the tick, so it is measured again."""

LOOKED_AT = 256
"""How many files of a folder each upkeep looks at, in turn."""


def longest_path(allowed_bytes: int) -> int:
    """The bytes of entries that a path may have if the directory may take `allowed_bytes`."""
    return int(max(0, allowed_bytes - SPARE_BYTES) * PATH_SHARE)


def holding(path_bytes: int) -> int:
    """The limit that a directory needs to hold a path of `path_bytes`."""
    return ceil(path_bytes / PATH_SHARE) + SPARE_BYTES


class ColdFile(NamedTuple):
    """An extent, or the folder of another model, where `name` is empty.

    `used_ns`: when it was used, but of another model's extent at the latest when it was looked at,
    since a clock may have been ahead; `noted_ns`: the use that is noted of it, its mtime.
    """

    used_ns: float
    noted_ns: float
    folder: Path
    name: str


NEVER_NS = -1
"""The use of a file of this process's folder that is no extent of its catalog."""


@dataclass(slots=True)
class _FolderFiles:
    """The files of a folder, and the folder itself as `.`: the bytes of each when it was last
    looked at, and their sum. `unseen`: files that upkeep has not looked at lately.
    """

    changed_ns: int = -1  # the folder's mtime; 0: to be measured again; -1: not measured yet
    sizes: dict[str, int] = field(default_factory=dict)
    n_bytes: int = 0
    n_extents: int = 0
    unseen: list[str] = field(default_factory=list)


class Space:
    """Measures the folders of all models; other files of the directory count for nothing.

    Right only while the write lock is held. Where a folder's mtime has changed, files were made or
    removed: its names are read, and the new ones looked at. Sums are kept, so that nothing else
    takes longer the more files there are. Methods raise OSError.
    """

    def __init__(
        self,
        files: OsFiles,
        directory: Path,
        folder: Path,
        limits: DiskLimits,
        catalog: Catalog,
        clock: Callable[[], float],
    ) -> None:
        """`folder` is this process's own, whose extents `catalog` has; `clock` has Unix time."""
        self._clock = clock
        self._catalog = catalog
        self._files = files
        self._directory = directory
        self._folder = folder
        self._limits = limits
        self._own = _FolderFiles()
        self._measured: dict[Path, _FolderFiles] = {folder: self._own}
        self._by_use = list[ColdFile]()  # a heap; see `coldest`
        self._lost = list[str]()
        self._free_bytes = 0  # beyond what is left to other programs; negative: they took of it
        self.used_bytes = 0  # of the folders of all models; any thread may read it

    @property
    def own_bytes(self) -> int:
        """Of this process's folder. Any thread may read it."""
        return self._own.n_bytes

    @property
    def is_taken(self) -> bool:
        """Whether other programs use some of the space that stays free."""
        return self._free_bytes < 0

    @property
    def allowed_bytes(self) -> int:
        """The bytes that all models together may take on this disk now."""
        return min(self._limits.max_bytes, self.used_bytes + self._free_bytes)

    def refresh(self) -> None:
        """Measure what may have changed since this process last held the write lock."""
        there = [self._folder, *folders(self._directory)]
        for folder in self._measured.keys() - set(there):
            self._drop(folder)
        for folder in there:
            try:
                self._measure(folder, self._measured.setdefault(folder, _FolderFiles()))
            except (FileNotFoundError, PermissionError):  # removed, or of another user
                self._drop(folder)
        self._look_at_disk()

    def look_again(self) -> None:
        """Look at LOOKED_AT files of each folder, which people may have changed in place."""
        for folder, measured in self._measured.items():
            if not measured.unseen:
                measured.unseen = list(measured.sizes)
            looked_at = measured.unseen[-LOOKED_AT:]
            del measured.unseen[-LOOKED_AT:]
            for name in looked_at:
                if name in measured.sizes:
                    self._look(folder, name)

    def take_lost(self) -> list[str]:
        """The extents of this process's folder that others have removed since the last call."""
        lost, self._lost = self._lost, []
        return lost

    def exceeds(self) -> bool:
        """Whether all models together take more than the limit."""
        return self.used_bytes > self._limits.max_bytes

    def lacks(self, n_bytes: int) -> bool:
        """Whether a file of `n_bytes` does not fit."""
        return self.used_bytes + n_bytes + SPARE_BYTES > self.allowed_bytes

    def create(self, name: str, buffers: Sequence[Buffer]) -> None:
        """Write an extent of this process, in full or not at all."""
        path = self._folder / name
        n_bytes = self._files.create(path, buffers)
        try:
            self._changed(name, n_bytes)
        except BaseException:
            with suppress(OSError):
                self._files.remove(path)
            raise
        self._order(ColdFile(0, 0, self._folder, name))  # until it is looked at

    def delete(self, name: str) -> None:
        """Delete an extent of this process."""
        self._files.remove(self._folder / name)
        self._changed(name, None)

    def stamp(self, name: str, used_ns: int) -> None:
        """Note when an extent of this process was last used, where other processes see it. One that
        they have evicted is no matter.
        """
        with suppress(OSError):
            self._files.stamp(self._folder / name, used_ns)

    def read(self, name: str, offset: int, n_bytes: int) -> memoryview:
        """Bytes of an extent of this process; fewer where the file ends before."""
        return self._files.read(self._folder / name, offset, n_bytes)

    def is_own(self, cold: ColdFile) -> bool:
        """Whether it is in the folder of this process."""
        return cold.folder == self._folder

    def coldest(self) -> ColdFile | None:
        """What is to be evicted next: a folder of another model without extents that no process has
        open, a file of this process that is no extent of its catalog, or the extent of any model
        that was used longest ago. O(log n) amortised.

        Each extent has a place in the heap, with a use that may be outdated.
        """
        for folder, measured in self._measured.items():
            is_empty = measured.changed_ns >= 0 and not measured.n_extents
            if measured is not self._own and is_empty and not is_open(folder):
                return ColdFile(-math.inf, -math.inf, folder, "")
        while self._by_use:
            cold = self._by_use[0]
            noted_ns = self._noted_ns(cold)
            if noted_ns == cold.noted_ns and noted_ns != NEVER_NS:
                return cold
            heapq.heappop(self._by_use)
            if noted_ns == NEVER_NS:
                return cold
            if noted_ns is not None:
                heapq.heappush(self._by_use, self._cold(cold.folder, cold.name, noted_ns))
        return None

    def _noted_ns(self, cold: ColdFile) -> int | None:
        """When it was used, as far as is known now; None where it is gone."""
        if not self._knows(cold.folder, cold.name):
            return None
        if self.is_own(cold):
            return self._own_ns(cold.name)
        use = self._look(cold.folder, cold.name)
        return None if use is None else use.used_ns

    def _own_ns(self, name: str) -> int:
        extent = self._catalog.named(name)
        return NEVER_NS if extent is None else extent.used_ns

    def _cold(self, folder: Path, name: str, noted_ns: int) -> ColdFile:
        is_own = folder == self._folder
        used_ns = noted_ns if is_own else min(noted_ns, int(self._clock() * 1e9))
        return ColdFile(used_ns, noted_ns, folder, name)

    def _order(self, cold: ColdFile) -> None:
        heapq.heappush(self._by_use, cold)
        n_extents = sum(measured.n_extents for measured in self._measured.values())
        if len(self._by_use) > 2 * max(n_extents, LOOKED_AT):
            self._by_use = [it for it in self._by_use if self._knows(it.folder, it.name)]
            heapq.heapify(self._by_use)

    def remove(self, cold: ColdFile) -> None:
        """Evict what another model has. Its process finds out when it next takes the lock."""
        self._files.remove(cold.folder / cold.name)
        if cold.name:
            self._note(cold.folder, cold.name, None)
            self._measured[cold.folder].changed_ns = 0
        else:
            self._drop(cold.folder)
        self._look_at_disk()

    def _changed(self, name: str, n_bytes: int | None) -> None:
        """An extent of this process takes `n_bytes` of disk now; None: it has been deleted."""
        self._note(self._folder, name, n_bytes)
        status = self._files.status(self._folder)
        self._note(self._folder, ".", status.n_bytes)
        self._own.changed_ns = status.used_ns
        self._look_at_disk()

    def _measure(self, folder: Path, measured: _FolderFiles) -> None:
        status = self._files.status(folder)
        if status.used_ns == measured.changed_ns:
            return
        for use in self._new_files(folder, measured):
            self._note(folder, use.name, use.n_bytes)
            if EXTENTS.fullmatch(use.name):
                noted_ns = self._own_ns(use.name) if measured is self._own else use.used_ns
                self._order(self._cold(folder, use.name, noted_ns))
        is_settled = abs(time.time_ns() - status.used_ns) > SETTLED_NS
        measured.changed_ns = status.used_ns if measured is self._own or is_settled else 0

    def _new_files(self, folder: Path, measured: _FolderFiles) -> Iterator[FileUse]:
        """The files of a folder that are not known, and the folder itself. Notes which are gone."""
        if measured.changed_ns < 0:
            yield from self._files.scan(folder)
            return
        names = self._files.names(folder)
        for name in measured.sizes.keys() - names - {"."}:
            self._lose(folder, name)
        for name in [".", *(names - measured.sizes.keys())]:
            if (use := self._look(folder, name)) is not None:
                yield use

    def _look_at_disk(self) -> None:
        free, total = self._files.disk(self._directory)
        self._free_bytes = free - int(self._limits.least_free * total)

    def _knows(self, folder: Path, name: str) -> bool:
        return folder in self._measured and name in self._measured[folder].sizes

    def _look(self, folder: Path, name: str) -> FileUse | None:
        """Note what a file takes; None where it is not there."""
        try:
            use = self._files.status(folder / name)._replace(name=name)
        except (FileNotFoundError, PermissionError, NotADirectoryError):
            self._lose(folder, name)
            return None
        self._note(folder, name, use.n_bytes)
        return use

    def _lose(self, folder: Path, name: str) -> None:
        """A file has been removed by others."""
        if folder == self._folder and EXTENTS.fullmatch(name):
            self._lost.append(name)
        self._note(folder, name, None)

    def _note(self, folder: Path, name: str, n_bytes: int | None) -> None:
        """A file takes `n_bytes` of disk now; None: it does not exist any more."""
        measured = self._measured[folder]
        before = measured.sizes.pop(name, None)
        if n_bytes is not None:
            measured.sizes[name] = n_bytes
        if EXTENTS.fullmatch(name):
            measured.n_extents += (n_bytes is not None) - (before is not None)
        measured.n_bytes += (n_bytes or 0) - (before or 0)
        self.used_bytes += (n_bytes or 0) - (before or 0)

    def _drop(self, folder: Path) -> None:
        """A folder does not exist any more, or cannot be read."""
        for name in list(self._measured[folder].sizes):
            self._lose(folder, name)
        self._measured[folder].changed_ns = -1
        if folder != self._folder:
            del self._measured[folder]
