"""How much of the disk the directory may take, and takes."""

from math import ceil
from pathlib import Path

from kvstore.tier.disk.files import Files
from kvstore.tier.disk.folder import folders
from kvstore.tier.disk.index import SLACK_BYTES
from kvstore.tier.types import TierLimits

PATH_SHARE = 0.75
"""Of what entries may take: the end of a path that took more would push its own beginning out. The
rest is for what stands beside it in its segments."""


STARTS_BYTES = 1 << 20
"""Left for the empty folders of models that start: nothing goes for their sake."""

SPARE_BYTES = SLACK_BYTES + STARTS_BYTES


def longest_path(allowed_bytes: int) -> int:
    """Bytes of entries that may hang from each other, where the directory may take so many."""
    return int(max(0, allowed_bytes - SPARE_BYTES) * PATH_SHARE)


def holding(path_bytes: int) -> int:
    """The bytes of a directory that has room for such a path."""
    return ceil(path_bytes / PATH_SHARE) + SPARE_BYTES


class Space:
    """Measures the folders of all models. Files that are not ours count for nothing, whatever the
    directory: it may be somebody's home. Right only while the write lock is held. Measuring 320
    segments takes a millisecond, so a folder is measured again only after it may have changed.
    Methods raise OSError.
    """

    def __init__(self, files: Files, directory: Path, folder: Path, limits: TierLimits) -> None:
        self.folder = folder
        """This process's own."""
        self._files = files
        self._directory = directory
        self._limits = limits
        self._measured: dict[Path, int | None] = {}  # by folder; None: to be measured
        self._used = self._spare = self._own = 0

    @property
    def last_used_bytes(self) -> int:
        """Of all models, as it was measured last."""
        return self._used

    @property
    def last_own_bytes(self) -> int:
        """Of this process's folder, as it was measured last."""
        return self._own

    @property
    def is_taken(self) -> bool:
        """Whether others have some of what is to be left free, as it was measured last."""
        return self._spare < 0

    @property
    def longest_path(self) -> int:
        """In bytes, as it was measured last."""
        return longest_path(min(self._limits.max_bytes, self._used + self._spare))

    def begin(self) -> None:
        """Call when the write lock has been taken: other processes may have changed their folders.
        They remove files of this one, too, and the caller that finds out calls `changed`.
        """
        own = self._measured.get(self.folder)
        self._measured = dict.fromkeys(folders(self._directory)) | {self.folder: own}

    def changed(self, folder: Path) -> None:
        """Something in the folder has been written or removed."""
        self._measured[folder] = None

    def exceeds(self) -> bool:
        """Whether what there is, and what the index may need, is more than the limit."""
        self._measure()
        return self._used + SLACK_BYTES > self._limits.max_bytes

    def lacks(self, n_bytes: int) -> bool:
        """Whether so much more, and what the index may need, would be more than the limit, or more
        than leaves others their part of the disk.
        """
        self._measure()
        allowed = min(self._limits.max_bytes, self._used + self._spare)
        return self._used + n_bytes + SPARE_BYTES > allowed

    def _measure(self) -> None:
        for folder, n_bytes in self._measured.items():
            if n_bytes is None:
                self._measured[folder] = self._allocated(folder)
        sizes = {folder: n_bytes or 0 for folder, n_bytes in self._measured.items()}
        self._used, self._own = sum(sizes.values()), sizes[self.folder]
        free, total = self._files.disk(self._directory)
        self._spare = free - int(self._limits.least_free * total)

    def _allocated(self, folder: Path) -> int:
        try:
            return self._files.allocated(folder)
        except (FileNotFoundError, PermissionError):  # removed, or written by another user
            return 0
