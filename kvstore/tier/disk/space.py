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


def longest_path(allowed_bytes: int) -> int:
    """Bytes of entries that may hang from each other, where the directory may take so many."""
    return int(max(0, allowed_bytes - SLACK_BYTES) * PATH_SHARE)


def holding(path_bytes: int) -> int:
    """The bytes of a directory that has room for such a path."""
    return ceil(path_bytes / PATH_SHARE) + SLACK_BYTES


class Space:
    """Measured, not booked: all files are looked at, those of other fingerprints too. 320 segments
    take a millisecond. All raise OSError.
    """

    def __init__(self, files: Files, directory: Path, folder: Path, limits: TierLimits) -> None:
        self._files = files
        self._directory = directory
        self._folder = folder
        self._limits = limits
        self._used = self._spare = 0

    @property
    def last_used_bytes(self) -> int:
        """As it was measured last."""
        return self._used

    @property
    def is_taken(self) -> bool:
        """Whether others have some of what is to be left free, as it was measured last."""
        return self._spare < 0

    @property
    def longest_path(self) -> int:
        """In bytes, as it was measured last."""
        allowed = min(self._limits.max_bytes, self._used + self._spare)
        return 0 if self.is_taken else longest_path(allowed)

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
        return self._used + n_bytes + SLACK_BYTES > allowed

    def drop_other(self) -> bool:
        """Remove the folder of another fingerprint, that which was opened longest ago. Whole: a
        segment of it by itself would leave descendants without parents.
        """
        other = next((it for it in folders(self._directory) if it != self._folder), None)
        if other is None:
            return False
        self._files.remove(other)
        return True

    def _measure(self) -> None:
        self._used = self._files.allocated(self._directory)
        free, total = self._files.disk(self._directory)
        self._spare = free - int(self._limits.least_free * total)
