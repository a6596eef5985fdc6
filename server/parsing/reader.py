"""Text that arrives in pieces, read by generators that wait for more of it."""

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeAlias, TypeVar

from server.parsing.parts import Content, Part

T = TypeVar("T")

Reading: TypeAlias = Generator[Part | None, None, T]
"""Yields what it has read, or None to wait for more text; returns T.

A reader that has been closed gives all that is left, so nothing waits any more.
"""

_SPACE = re.compile(r"\s*")
_NAME = re.compile(r"[\w.:/-]{1,256}")  # of a function, as models write them


class NotACall(Exception):
    """What stands behind a marker is no call, and nothing of it has been given out."""


class Reader:
    """The text that has arrived and is not consumed. `is_closed` when no more will come."""

    def __init__(self) -> None:
        self._text = ""
        self._record: str | None = None  # what has been taken since `record`
        self.is_closed = False

    def add(self, text: str) -> None:
        self._text += text

    def close(self) -> None:
        self.is_closed = True

    @property
    def text(self) -> str:
        """What is there to be read."""
        return self._text

    def take(self, n_characters: int) -> str:
        """Consume that many characters, or what there is."""
        taken, self._text = self._text[:n_characters], self._text[n_characters:]
        if self._record is not None:
            self._record += taken
        return taken

    def give_back(self, text: str) -> None:
        """The text that was taken last is to be read again."""
        self._text = text + self._text
        if self._record is not None:
            self._record = self._record.removesuffix(text)

    def record(self) -> None:
        """Remember what is taken from now on."""
        self._record = ""

    def forget(self) -> None:
        """Remember it no longer."""
        self._record = None

    def rewind(self) -> bool:
        """Give all back that was taken since `record`; False when that has been forgotten."""
        record, self._record = self._record, None
        if record is None:
            return False
        self.give_back(record)
        return True

    def until(self, markers: Sequence[str], part: Callable[[str], Part]) -> Reading[str]:
        """Yield the text before the first of the markers, slice by slice, none of it a marker's.

        Consumes the marker and returns it with the white space in front of it, which is not
        yielded; "" where the text ends without one. Of markers that begin at the same character
        the longest counts.
        """
        while True:
            if (found := first_marker(self._text, markers)) is not None:
                at, marker = found
                if before := self._text[:at].rstrip():
                    yield part(self.take(len(before)))
                return self.take(at - len(before) + len(marker))
            if free := self._free(markers):
                yield part(self.take(free))
            if self.is_closed:
                return ""
            yield None

    def _free(self, markers: Sequence[str]) -> int:
        """How much of the text cannot be a marker's, nor the white space in front of one."""
        if self.is_closed or not markers:
            return len(self._text)
        return len(self._text[: len(self._text) - held_back(self._text, markers)].rstrip())

    def collect(self, markers: Sequence[str]) -> Reading[tuple[str, str]]:
        """The whole text before the first of the markers, and that marker, both consumed."""
        searched = 0
        longest = max(map(len, markers))
        while True:
            if (found := first_marker(self._text, markers, searched)) is not None:
                before = self.take(found[0])
                return before, self.take(len(found[1]))
            if self.is_closed:
                return self.take(len(self._text)), ""
            searched = max(len(self._text) - longest, 0)
            yield None

    def starts(self, options: Sequence[str]) -> Reading[str]:
        """Consume and return the longest option with which the text begins; "" for none."""
        while not self.is_closed and any(
            option.startswith(self._text) and option != self._text for option in options
        ):
            yield None
        found = [option for option in options if self._text.startswith(option)]
        return self.take(len(max(found, key=len, default="")))

    def name(
        self, separators: Sequence[str], pattern: re.Pattern[str] = _NAME
    ) -> Reading[tuple[str, str]]:
        """A name and the separator behind it, both consumed, white space around the name dropped.

        Raises NotACall as soon as what stands there is no name, which is what the pattern matches.
        """
        yield from self.skip_space()
        while True:
            if (found := first_marker(self._text, separators)) is not None:
                name = self.take(found[0]).strip()
                if not pattern.fullmatch(name):
                    raise NotACall
                return name, self.take(len(found[1]))
            free = self._text[: len(self._text) - held_back(self._text, separators)].strip()
            if self.is_closed or (free and not pattern.fullmatch(free)):
                raise NotACall
            yield None

    def peek(self) -> Reading[str]:
        """The next character, not consumed; "" at the end."""
        while not self._text and not self.is_closed:
            yield None
        return self._text[:1]

    def skip_space(self) -> Reading[str]:
        """Consume white space, and return it."""
        skipped = ""
        while True:
            match = _SPACE.match(self._text)
            skipped += self.take(match.end() if match else 0)
            if self._text or self.is_closed:
                return skipped
            yield None


def gathered(steps: Reading[T]) -> Reading[tuple[str, T]]:
    """The text of all Content that the steps yield, in place of it, and what they return."""
    slices: list[str] = []
    while True:
        try:
            part = next(steps)
        except StopIteration as stop:
            return "".join(slices), stop.value
        if part is None:
            yield None
        elif isinstance(part, Content):
            slices.append(part.text)


def first_marker(text: str, markers: Sequence[str], start: int = 0) -> tuple[int, str] | None:
    """Where the first marker begins, and which it is."""
    found = [
        (at, -len(marker), marker) for marker in markers if (at := text.find(marker, start)) >= 0
    ]
    if not found:
        return None
    at, _, marker = min(found)
    return at, marker


def held_back(text: str, markers: Sequence[str]) -> int:
    """The length of the longest end of the text that may turn out to begin a marker."""
    longest = max((len(marker) for marker in markers), default=0)
    for length in range(min(longest - 1, len(text)), 0, -1):
        if any(marker.startswith(text[-length:]) for marker in markers):
            return length
    return 0
