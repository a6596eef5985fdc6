"""The screen of a chat: a terminal or a pipe. The only module that prints.

The text (of a model, a server, a log) is untrusted: control characters are removed, and nothing is
read as rich's markup.
"""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from typing import TextIO

from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style
from rich.text import Text

from server.terminal.text import printable

SPINNER_CELLS = 3
PLAIN, DIM, RED = Style.null(), Style(dim=True), Style(color="red")


class Screen:
    """Prints answers to one console, and notes and errors to another, which may be the same."""

    def __init__(self, read: Callable[[], str], answers: Console, notes: Console) -> None:
        self._read = read
        self._answers = answers
        self._notes = notes
        self._stream = (answers, PLAIN)  # what was written last, and how
        self._at_line_start = True

    def read(self) -> str:
        """The user's next text. Raises EOFError or KeyboardInterrupt when there is none."""
        return self._read().rstrip()

    def answer(self, text: str) -> None:
        """A piece of an answer, which the next may continue."""
        self._piece(text, self._answers, PLAIN)

    def reasoning(self, text: str) -> None:
        """A piece of a model's thoughts, which the next may continue."""
        self._piece(text, self._notes, DIM)

    def note(self, text: str) -> None:
        self._line(text, DIM)

    def error(self, text: str) -> None:
        self._line(f"error: {text}", RED)

    def interrupted(self) -> None:
        """The user has pressed Ctrl-C, which the terminal has echoed."""
        self._at_line_start = False

    @contextmanager
    def busy(self, text: str) -> Iterator[Callable[[str], None]]:
        """A spinner with a text, which the function it gives replaces. Nothing in a pipe."""
        with self._notes.status(self._status(text)) as status:
            yield lambda line: status.update(self._status(line))

    def _status(self, text: str) -> Text:
        """As much as fits into the spinner's line."""
        status = Text(printable(text))
        status.truncate(self._notes.width - SPINNER_CELLS, overflow="ellipsis")
        return status

    def _line(self, text: str, style: Style) -> None:
        self._end_line()
        self._piece(text + "\n", self._notes, style)

    def _piece(self, text: str, console: Console, style: Style) -> None:
        text = printable(text)
        if not text:
            return
        if (console, style) != self._stream:
            self._end_line()
        self._stream = console, style
        _write(console, text, style)
        self._at_line_start = text.endswith("\n")

    def _end_line(self) -> None:
        if not self._at_line_start:
            console, style = self._stream
            _write(console, "\n", style)
        self._at_line_start = True


def terminal_screen(read: Callable[[], str]) -> Screen:
    """A screen with colours, whose input is `read`."""
    console = Console()
    return Screen(read, console, console)


def pipe_screen() -> Screen:
    """Plain text, read by lines: answers alone on standard output, the rest on standard error."""
    return Screen(input, _plain_console(sys.stdout), _plain_console(sys.stderr))


def is_terminal() -> bool:
    """Whether a person sits at both ends."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def replace_bad_text() -> None:
    """Replace what the locale's encoding lacks by `?` or U+FFFD, instead of raising."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")


def _plain_console(file: TextIO) -> Console:
    return Console(file=file, force_terminal=False, color_system=None)


def _write(console: Console, text: str, style: Style) -> None:
    """As a segment, because rich would wrap a string, and turn its tabs into spaces. A Ctrl-C
    waits, because rich writes again later what it was interrupted in writing.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        console.print(Segments([Segment(text, style)]), end="", soft_wrap=True)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
