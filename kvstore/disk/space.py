"""The space that the directory may take and takes, and the extents of other models that could be
evicted.
"""

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import NamedTuple

from kvstore.disk.extent import OsFiles
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


def longest_path(allowed_bytes: int) -> int:
    """The bytes of entries that a path may have if the directory may take `allowed_bytes`."""
    return int(max(0, allowed_bytes - SPARE_BYTES) * PATH_SHARE)


def holding(path_bytes: int) -> int:
    """The limit that a directory needs to hold a path of `path_bytes`."""
    return ceil(path_bytes / PATH_SHARE) + SPARE_BYTES


class ColdFile(NamedTuple):
    """An extent of another model, or its folder, where `name` is empty."""

    used_ns: float
    folder: Path
    name: str


@dataclass(slots=True)
class _FolderFiles:
    """The files of a folder when it was last measured. `extents`: by name, the bytes and the last
    use in nanoseconds of Unix time; `other_bytes`: of all other files.
    """

    changed_ns: int = -1  # the folder's mtime; 0: to be measured again; -1: not measured yet
    other_bytes: int = 0
    extents: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def n_bytes(self) -> int:
        return self.other_bytes + sum(n_bytes for n_bytes, _ in self.extents.values())


class Space:
    """Measures the folders of all models; other files of the directory count for nothing.

    Right only while the write lock is held. A folder is measured again when its mtime has changed,
    that is when files were made or removed. Methods raise OSError.
    """

    def __init__(self, files: OsFiles, directory: Path, folder: Path, limits: DiskLimits) -> None:
        """`folder` is this process's own."""
        self._files = files
        self._directory = directory
        self._folder = folder
        self._limits = limits
        self._measured: dict[Path, _FolderFiles] = {folder: _FolderFiles()}
        self._free_bytes = 0  # beyond what is left to other programs; negative: they took of it
        self.own_bytes = 0  # of this process's folder, as last measured; any thread may read it
        self.used_bytes = 0  # of the folders of all models, as last measured

    @property
    def is_taken(self) -> bool:
        """Whether other programs use some of the space that stays free."""
        return self._free_bytes < 0

    @property
    def allowed_bytes(self) -> int:
        """The bytes that all models together may take on this disk now."""
        return min(self._limits.max_bytes, self.used_bytes + self._free_bytes)

    def forget(self) -> None:
        """Have the next `refresh` measure all folders: people may have changed files in place."""
        self._measured = {self._folder: _FolderFiles()}

    def refresh(self) -> None:
        """Measure what may have changed since this process last held the write lock."""
        known = self._measured
        self._measured = {
            path: known.get(path, _FolderFiles()) for path in folders(self._directory)
        }
        self._measured.setdefault(self._folder, known[self._folder])
        for folder, measured in self._measured.items():
            try:
                self._measure(folder, measured)
            except (FileNotFoundError, PermissionError):  # removed, or of another user
                self._measured[folder] = _FolderFiles()
        self._add_up()

    def own_names(self) -> set[str]:
        """The extents of this process's folder that exist."""
        return set(self._measured[self._folder].extents)

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

    def coldest_of_others(self) -> ColdFile | None:
        """The least recently used item of another model: an extent, or a folder without extents
        that no process has open.
        """
        while True:
            coldest: ColdFile | None = None
            for folder, measured in self._measured.items():
                if folder != self._folder:
                    for name, (_, used_ns) in measured.extents.items():
                        if coldest is None or used_ns < coldest.used_ns:
                            coldest = ColdFile(used_ns, folder, name)
                    if measured.changed_ns >= 0 and not measured.extents and not is_open(folder):
                        return ColdFile(-math.inf, folder, "")
            if coldest is None or self._is_up_to_date(coldest):
                return coldest

    def remove(self, cold: ColdFile) -> None:
        """Evict what another model has. Its process finds out when it next takes the lock."""
        self._files.remove(cold.folder / cold.name)
        if cold.name:
            del self._measured[cold.folder].extents[cold.name]
            self._measured[cold.folder].changed_ns = 0
        else:
            del self._measured[cold.folder]
        self._add_up()

    def _changed(self, name: str, n_bytes: int | None) -> None:
        """An extent takes `n_bytes` of disk now; None: it has been deleted."""
        own = self._measured[self._folder]
        own.extents.pop(name, None)
        if n_bytes is not None:
            own.extents[name] = (n_bytes, 0)
        own.changed_ns = self._files.changed_ns(self._folder)
        self._add_up()

    def _measure(self, folder: Path, measured: _FolderFiles) -> None:
        changed_ns = self._files.changed_ns(folder)
        if changed_ns == measured.changed_ns:
            return
        measured.other_bytes, measured.extents = 0, {}
        for name, _, n_bytes, used_ns in self._files.scan(folder):
            if EXTENTS.fullmatch(name):
                measured.extents[name] = (n_bytes, used_ns)
            else:
                measured.other_bytes += n_bytes
        is_settled = folder == self._folder or time.time_ns() - changed_ns > SETTLED_NS
        measured.changed_ns = changed_ns if is_settled else 0

    def _add_up(self) -> None:
        """Note how much there is now. The sums are not made when they are read, since other threads
        read them while folders are measured.
        """
        self.own_bytes = self._measured[self._folder].n_bytes
        self.used_bytes = sum(each.n_bytes for each in self._measured.values())
        free, total = self._files.disk(self._directory)
        self._free_bytes = free - int(self._limits.least_free * total)

    def _is_up_to_date(self, cold: ColdFile) -> bool:
        """Whether the file still was last used then. Notes it where it was not."""
        extents = self._measured[cold.folder].extents
        try:
            used_ns = self._files.changed_ns(cold.folder / cold.name)
        except FileNotFoundError:
            del extents[cold.name]
            self._add_up()
            return False
        if used_ns == cold.used_ns:
            return True
        extents[cold.name] = (extents[cold.name][0], used_ns)
        return False
