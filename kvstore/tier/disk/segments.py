"""Segment files: payloads one after the other, raw, append only, and no more when they are full.

`00000042.kv` is segment 42. It has no header: what stands where is the index's to say. Numbers are
not used again while the process lives, so whoever reads a file by its number finds its own bytes or
no file. A file's time of change is when something in it was last used: there others see it.
"""

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kvstore.tier.disk.files import Files
from kvstore.tier.types import Entry

SUFFIX = ".kv"
NUMBER = re.compile("[0-9]{8,18}")
"""Somebody else's file may have a number that the index could not hold."""


class Place(NamedTuple):
    segment: int
    offset: int


class Segments:
    """The files of one folder; `current` is the one that grows. All raise OSError."""

    def __init__(self, files: Files, folder: Path, segment_bytes: int) -> None:
        self._files = files
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._current = max(self.numbers(), default=0) + 1
        self._end = 0

    @property
    def current(self) -> int:
        return self._current

    def numbers(self) -> list[int]:
        """Of the files there are."""
        stems = (path.stem for path in self._folder.glob(f"*{SUFFIX}"))
        return sorted(int(stem) for stem in stems if NUMBER.fullmatch(stem))

    def size(self, number: int) -> int:
        """Bytes; none where there is no such file."""
        try:
            return self._files.size(self._path(number))
        except FileNotFoundError:
            return 0

    def last_used(self, number: int) -> float:
        """As it was stamped last; 0 where there is no such file."""
        try:
            return self._files.stamped(self._path(number))
        except FileNotFoundError:
            return 0.0

    def stamp(self, number: int, last_used: float) -> None:
        """If it can be: others may have evicted it, and a damaged index knows strange times."""
        with suppress(OSError, ValueError):
            self._files.stamp(self._path(number), last_used)

    def lost(self, numbers: Iterable[int]) -> list[int]:
        """Those of the segments that others have evicted. If it is the one that grows, another one
        does from now on.
        """
        there = set(self.numbers())
        if self._end and self._current not in there:
            self._current, self._end = self._current + 1, 0
        return [number for number in numbers if number not in there]

    def resume(self, number: int, end: int) -> None:
        """Go on behind the last record of a segment that is not full. What a process that was
        killed left behind that, no index knows.
        """
        if end < self._segment_bytes:
            self._files.truncate(self._path(number), end)
            self._current, self._end = number, end

    def places(self, entries: Iterable[Entry]) -> list[Place]:
        """Where they will stand. An entry larger than a segment has one for itself."""
        segment, end, places = self._current, self._end, list[Place]()
        for entry in entries:
            if end and end + entry.n_bytes > self._segment_bytes:
                segment, end = segment + 1, 0
            places.append(Place(segment, end))
            end += entry.n_bytes
        return places

    def write(self, places: Sequence[Place], entries: Sequence[Entry]) -> None:
        """The payloads at their places: one call for each segment. They count when `advance` is
        told so; until then the next are written over them.
        """
        by_segment: dict[int, list[Entry]] = {}
        for place, entry in zip(places, entries, strict=True):
            by_segment.setdefault(place.segment, []).append(entry)
        starts = dict(reversed(places))
        for number, written in by_segment.items():
            buffers = [part for entry in written for part in entry.parts if part is not None]
            self._files.write(self._path(number), starts[number], buffers)

    def advance(self, place: Place, entry: Entry) -> None:
        """The last of what was written is in the index."""
        self._current, self._end = place.segment, place.offset + entry.n_bytes

    def retreat(self, places: Sequence[Place]) -> None:
        """What was written is not in the index: give its space back."""
        for number in {place.segment for place in places}:
            if number != self._current or not self._end:
                self._files.remove(self._path(number))
            else:
                self._files.truncate(self._path(number), self._end)

    def read(self, number: int, offset: int, n_bytes: int) -> memoryview:
        return self._files.read(self._path(number), offset, n_bytes)

    def remove(self, number: int) -> None:
        if number == self._current:
            self._current, self._end = number + 1, 0
        self._files.remove(self._path(number))

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:08d}{SUFFIX}"
