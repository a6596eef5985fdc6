"""Finds the text for the user in a model's answer: what is no reasoning and no tool call."""

from collections.abc import Sequence
from typing import NamedTuple

from engine.values.request import Markup

MAX_HELD_SPACE = 32
"""White space that is held back, because none of it is content if a marker follows. A model that
writes nothing else does not wait for ever."""


class Run(NamedTuple):
    """A run of text, and whether it is content."""

    text: str
    is_content: bool


class ContentFinder:
    """Splits a text that comes in pieces into content and what is none.

    All runs together are the text. The end of a piece is held back while it may begin a marker, or
    is white space that a marker may follow.
    """

    def __init__(self, markup: Markup) -> None:
        self._markup = markup
        self._begins = [begin for begin, _ in markup.spans]
        self._held = ""
        self._until: str | None = markup.opened or None  # the end of the span; "": there is none
        self._is_first = True  # nothing but white space has come, or markup
        self._is_after_span = self._until is not None

    @property
    def is_content(self) -> bool:
        """Whether text that comes now is content."""
        return self._until is None

    def add(self, piece: str) -> list[Run]:
        """The runs that this piece completes."""
        return self._split(self._held + piece, is_last=False)

    def finish(self) -> list[Run]:
        """The run that is held back."""
        return self._split(self._held, is_last=True)

    def _split(self, text: str, *, is_last: bool) -> list[Run]:
        runs, self._held = list[Run](), ""
        while text:
            taken, is_content = self._next(text, is_last=is_last)
            if not taken:
                self._held = text
                break
            runs.append(Run(text[:taken], is_content))
            text = text[taken:]
        return runs

    def _next(self, text: str, *, is_last: bool) -> tuple[int, bool]:
        """The length of the first run, 0 where more text is needed, and whether it is content."""
        if self._until is not None:
            return self._inside(text, is_last=is_last), False
        if self._is_first and (found := self._at_beginning(text, is_last=is_last)):
            return found
        at, begin = _first(text, self._begins)
        if begin:
            before = text[:at].rstrip()
            if before:
                self._is_first = False
                return len(before), True
            self._until = next(end for one, end in self._markup.spans if one == begin)
            if self._until == begin:  # a marker alone
                self._until, self._is_after_span = None, True
            return at + len(begin), False
        n_held = 0 if is_last else _held(text, self._begins)
        free = text[: len(text) - n_held]
        said = free if is_last else free.rstrip()
        if len(free) - len(said) > MAX_HELD_SPACE:
            said = free
        if said.strip():
            self._is_first = False
        return len(said), True

    def _at_beginning(self, text: str, *, is_last: bool) -> tuple[int, bool] | None:
        """What `_next` returns where the content begins; None where that begins as it goes on."""
        n_space = len(text) - len(text.lstrip())
        if n_space == len(text):
            return (n_space if is_last or n_space > MAX_HELD_SPACE else 0), True
        if n_space and self._is_after_span:
            return n_space, False  # between reasoning and the answer, or around calls
        if any(text.startswith(one, n_space) for one in self._markup.leading):
            self._until, self._is_first = "", False
            return len(text), False
        return None

    def _inside(self, text: str, *, is_last: bool) -> int:
        """The length of a span's text, up to its end where that is there."""
        assert self._until is not None
        at = text.find(self._until) if self._until else -1
        if at < 0:
            return len(text) - (0 if is_last or not self._until else _held(text, [self._until]))
        n_taken = at + len(self._until)
        self._until, self._is_first, self._is_after_span = None, True, True
        return n_taken


def _first(text: str, markers: Sequence[str]) -> tuple[int, str]:
    """The first marker, the longest of those at one place, and its place."""
    found = [(at, -len(one), one) for one in markers if (at := text.find(one)) >= 0]
    if not found:
        return len(text), ""
    at, _, marker = min(found)
    return at, marker


def _held(text: str, markers: Sequence[str]) -> int:
    """The length of the longest end of the text that may begin a marker."""
    longest = max((len(marker) for marker in markers), default=1)
    for length in range(min(longest - 1, len(text)), 0, -1):
        if any(marker.startswith(text[-length:]) for marker in markers):
            return length
    return 0
