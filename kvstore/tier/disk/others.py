"""What other models keep in the directory, as far as it has to make room.

The file system says all there is to know: a segment's time of change is when it was last used, and
its removal is its eviction, which the process that has it open finds out when it next writes. So
nobody waits for another, and nobody need run.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvstore.tier.disk.files import Files
from kvstore.tier.disk.folder import folders, is_open
from kvstore.tier.disk.segments import Segments


@dataclass(frozen=True, slots=True, order=True)
class ColdSegment:
    """`last_used`: in Unix seconds. A folder without segments that no process has open is one, too,
    used before all others.
    """

    last_used: float
    folder: Path
    number: int


class Others:
    """For who holds the write lock. All raise OSError."""

    def __init__(self, files: Files, directory: Path, folder: Path) -> None:
        """`folder` is one's own."""
        self._files = files
        self._directory = directory
        self._folder = folder

    def coldest(self) -> ColdSegment | None:
        return min(self._segments(), default=None)

    def drop(self, cold: ColdSegment) -> None:
        """And with the last segment of a folder that nobody has open the folder."""
        segments = Segments(self._files, cold.folder, 0)
        segments.remove(cold.number)
        if not segments.numbers() and not is_open(cold.folder):
            self._files.remove(cold.folder)

    def _segments(self) -> Iterator[ColdSegment]:
        for folder in folders(self._directory):
            if folder != self._folder:
                segments = Segments(self._files, folder, 0)
                numbers = segments.numbers()
                for number in numbers:
                    yield ColdSegment(segments.last_used(number), folder, number)
                if not numbers and not is_open(folder):
                    yield ColdSegment(-math.inf, folder, 0)
