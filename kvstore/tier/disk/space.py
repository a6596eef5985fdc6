"""How much of the disk the directory may take, and takes."""

from math import ceil
from pathlib import Path

from kvstore.tier.disk.files import Files
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
    """Measured, not booked: all files are looked at, those of other models too. 320 segments take a
    millisecond. Right for who holds the write lock; all raise OSError.
    """

    def __init__(self, files: Files, directory: Path, folder: Path, limits: TierLimits) -> None:
        self._files = files
        self._directory = directory
        self._folder = folder
        self._limits = limits
        self._used = self._spare = self._own = 0

    @property
    def last_used_bytes(self) -> int:
        """Of all models, as it was measured last."""
        return self._used

    @property
    def last_own_bytes(self) -> int:
        """Of this one's folder, as it was when `exceeds` was asked last."""
        return self._own

    @property
    def is_taken(self) -> bool:
        """Whether others have some of what is to be left free, as it was measured last."""
        return self._spare < 0

    @property
    def longest_path(self) -> int:
        """In bytes, as it was measured last."""
        return longest_path(min(self._limits.max_bytes, self._used + self._spare))

    def exceeds(self) -> bool:
        """Whether what there is, and what the index may need, is more than the limit."""
        self._measure()
        self._own = self._files.allocated(self._folder)
        return self._used + SLACK_BYTES > self._limits.max_bytes

    def lacks(self, n_bytes: int) -> bool:
        """Whether so much more, and what the index may need, would be more than the limit, or more
        than leaves others their part of the disk.
        """
        self._measure()
        allowed = min(self._limits.max_bytes, self._used + self._spare)
        return self._used + n_bytes + SPARE_BYTES > allowed

    def _measure(self) -> None:
        self._used = self._files.allocated(self._directory)
        free, total = self._files.disk(self._directory)
        self._spare = free - int(self._limits.least_free * total)
