"""How much of the disk the directory may take, and takes."""

from pathlib import Path

from kvstore.tier.disk.files import Files
from kvstore.tier.disk.folder import folders
from kvstore.tier.disk.index import SLACK_BYTES
from kvstore.tier.types import TierLimits


class Space:
    """Measured, not booked: all files are looked at, those of other fingerprints too. 320 segments
    take a millisecond. All raise OSError.
    """

    def __init__(self, files: Files, directory: Path, folder: Path, limits: TierLimits) -> None:
        self._files = files
        self._directory = directory
        self._folder = folder
        self._limits = limits
        self._used = 0

    @property
    def last_used_bytes(self) -> int:
        """As it was measured last."""
        return self._used

    def lacks(self, n_bytes: int) -> bool:
        """Whether so much more, and what the index may need, would be more than is allowed: more
        than the limit, or than leaves others their part of the disk.
        """
        self._used = self._files.allocated(self._directory)
        free, total = self._files.disk(self._directory)
        spare = free - int(self._limits.least_free * total)
        allowed = min(self._limits.max_bytes, self._used + spare)
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
