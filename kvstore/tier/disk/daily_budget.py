"""How much all processes together have written on a day of UTC, and may.

`DIRECTORY/written` has the day, counted from 1970, and the bytes, as text.
"""

from collections.abc import Callable
from pathlib import Path

from kvstore.tier.disk.files import Files

FILE_NAME = "written"
MOST_TEXT = 64
SECONDS_OF_DAY = 86_400


class DailyBudget:
    """For who holds the write lock. What raises OSError changes nothing."""

    def __init__(
        self, files: Files, directory: Path, daily_bytes: float, clock: Callable[[], float]
    ) -> None:
        self._files = files
        self._path = directory / FILE_NAME
        self._daily_bytes = daily_bytes
        self._clock = clock

    def left(self) -> float:
        """Bytes. Raises OSError."""
        return self._daily_bytes - self._written(self._today())

    def spend(self, n_bytes: int) -> None:
        """Raises OSError."""
        today = self._today()
        text = f"{today} {self._written(today) + n_bytes:020}\n"  # of one length: it is not cut
        self._files.write(self._path, 0, (text.encode(),))

    def _today(self) -> int:
        return int(self._clock() // SECONDS_OF_DAY)

    def _written(self, today: int) -> int:
        """None where nobody has written yet, or somebody has damaged the file."""
        try:
            day, n_bytes = map(int, bytes(self._files.read(self._path, 0, MOST_TEXT)).split())
        except (FileNotFoundError, ValueError):
            return 0
        return n_bytes if day == today else 0
