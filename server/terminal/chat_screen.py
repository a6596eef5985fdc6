"""The screen and the line editor of `rootstock chat`: a terminal or a pipe.

The text (of a model, a server, a log) is untrusted: control characters are removed, and nothing is
read as rich's markup.
"""

import math
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TextIO

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.completion import (
    CompleteEvent,
    Completer,
    Completion,
    PathCompleter,
    WordCompleter,
)
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import Condition, has_focus
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from rich.cells import cell_len
from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style
from rich.text import Text

from server.settings.folders import state_folder
from server.terminal.client import PromptProgress
from server.terminal.console import printable

SPINNER_CELLS = 3
BAR_CELLS = 16
SHOWN_AFTER_MS = 2000
PLAIN, DIM, RED = Style.null(), Style(dim=True), Style(color="red")
MAX_HISTORY_BYTES = 2**20
PATH_COMMAND = "/image"
"""The command whose argument is the path of a file."""
TAB_COLUMNS = 4

# Where a line may break: next to spaces, and next to each character of a script without spaces,
# which is two columns wide, or an emoji
WIDE = re.compile(
    "[\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\uff00-\uff60\U0001f300-\U0003fffd]"
)
TOKENS = re.compile(rf"\n|[^\S\n]+|{WIDE.pattern}|(?:(?!{WIDE.pattern})\S)+")

editing = has_focus(DEFAULT_BUFFER)  # and not searching in the history


class WordWrap:
    """Breaks lines at words, in text that comes in pieces and is printed at once. A word that
    turns out not to fit is taken back, and begins the next line.

    The last column stays empty: after a character in it some terminals have moved the cursor on,
    and others have not.
    """

    def __init__(self) -> None:
        self._column = 0
        self._word = ""  # which the next piece may continue

    def take(self, text: str, width: int) -> str:
        """The text with line breaks, and with the control sequences that take words back, for a
        terminal of `width` columns.
        """
        return "".join(self._placed(token, width - 1) for token in TOKENS.findall(text))

    def _placed(self, token: str, width: int) -> str:
        if token == "\n":
            self._column, self._word = 0, ""
            return token
        if token.isspace():
            token = token.expandtabs(TAB_COLUMNS)
            fitting = token[: max(width - self._column, 0)]
            self._column, self._word = self._column + len(token), ""
            return fitting
        word = "" if WIDE.match(token) else self._word
        n_cells, word_cells = cell_len(token), cell_len(word)
        self._column += n_cells
        self._word = "" if WIDE.match(token) else word + token
        if self._column <= width or self._column == word_cells + n_cells:
            return token  # a word that is longer than a line is left to the terminal
        self._column = word_cells + n_cells
        back = f"\x1b[{word_cells}D\x1b[K" if word_cells else ""
        return f"{back}\n{word}{token}"


class Screen:
    """Prints answers to one console, and notes and errors to another, which may be the same."""

    def __init__(self, read: Callable[[], str], answers: Console, notes: Console) -> None:
        self._read = read
        self._answers = answers
        self._notes = notes
        self._stream = (answers, PLAIN)  # console and style of the last piece
        self._at_line_start = True
        self._wrap = WordWrap()

    def read(self) -> str:
        """The user's next text. Raises EOFError or KeyboardInterrupt when there is none."""
        return self._read().rstrip()

    def answer(self, text: str) -> None:
        """Print a piece of an answer, which the next piece may continue."""
        self._piece(text, self._answers, PLAIN)

    def reasoning(self, text: str) -> None:
        """Print a piece of a model's reasoning, which the next piece may continue."""
        self._piece(text, self._notes, DIM)

    def note(self, text: str) -> None:
        """Print a dim line."""
        self._line(text, DIM)

    def error(self, text: str) -> None:
        """Print an error as a red line."""
        self._line(f"error: {text}", RED)

    def interrupted(self) -> None:
        """Note that the user has pressed Ctrl-C, which the terminal has echoed."""
        self._at_line_start = False

    @contextmanager
    def busy(self, text: str) -> Iterator[Callable[[str], None]]:
        """Show a spinner with a text while the block runs; nothing in a pipe. Gives a function that
        replaces the text.
        """
        with self._notes.status(self._status(text)) as status:
            yield lambda line: status.update(self._status(line))

    @contextmanager
    def reading(self) -> Iterator[Callable[[PromptProgress | None], None]]:
        """Show how much of a prompt is read, where that takes more than SHOWN_AFTER_MS. Gives a
        function that takes the progress, and None when the answer comes.
        """
        with ExitStack() as shown:
            update: Callable[[str], None] | None = None

            def show(progress: PromptProgress | None) -> None:
                nonlocal update
                if progress is None or progress.share >= 1:
                    shown.close()
                    update = None
                elif update is not None:
                    update(_reading_line(progress))
                elif progress.time_ms > SHOWN_AFTER_MS:
                    update = shown.enter_context(self.busy(_reading_line(progress)))

            yield show

    def _status(self, text: str) -> Text:
        """The part of the text that fits into the spinner's line."""
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
        wrapped = self._wrap.take(text, console.width) if console.is_terminal else text
        _write(console, wrapped, style)
        self._at_line_start = text.endswith("\n")

    def _end_line(self) -> None:
        if not self._at_line_start:
            console, style = self._stream
            _write(console, "\n", style)
        self._at_line_start = True
        self._wrap = WordWrap()


def _reading_line(progress: PromptProgress) -> str:
    n_full = int(progress.share * BAR_CELLS)
    bar = "━" * n_full + "─" * (BAR_CELLS - n_full)
    line = f"reading {bar} {progress.processed:,} of {progress.total:,} tokens"
    if (seconds := progress.seconds_left) is None:
        return line
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{line}, {minutes}:{rest:02} left"


def is_terminal() -> bool:
    """Whether standard input and standard output are both a terminal."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def terminal_screen(read: Callable[[], str]) -> Screen:
    """A screen with colours, whose input is `read`."""
    console = Console()
    return Screen(read, console, console)


def pipe_screen() -> Screen:
    """Plain text, read by lines: answers alone on standard output, the rest on standard error."""
    return Screen(input, _plain_console(sys.stdout), _plain_console(sys.stderr))


def _plain_console(file: TextIO) -> Console:
    return Console(file=file, force_terminal=False, color_system=None)


def _write(console: Console, text: str, style: Style) -> None:
    """Write a segment: rich would wrap a string, and turn its tabs into spaces. A Ctrl-C is held
    back until it is written, because rich writes interrupted output again later.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        console.print(Segments([Segment(text, style)]), end="", soft_wrap=True)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


@Condition
def something_typed() -> bool:
    return bool(get_app().current_buffer.text)


@Condition
def command_begun() -> bool:
    return get_app().current_buffer.text.startswith("/")


def line_reader(commands: Mapping[str, str], history: History) -> Callable[[], str]:
    """A function that reads the user's next text, which may have several lines. It raises EOFError
    for Ctrl-D and KeyboardInterrupt for Ctrl-C where nothing is typed.

    `commands`, with descriptions, are completed, and the path after PATH_COMMAND. A paste of
    several lines arrives as one piece (bracketed paste) and is sent by Enter, not by its own line
    breaks.
    """
    session: PromptSession[str] = PromptSession(
        "> ",
        multiline=True,
        key_bindings=_keys(),
        history=history,
        completer=_Completions(commands),
        complete_while_typing=command_begun,
        reserve_space_for_menu=len(commands),
        enable_suspend=True,  # Ctrl-Z
    )
    return session.prompt


class _Completions(Completer):
    """Of commands, and of the path after PATH_COMMAND."""

    def __init__(self, commands: Mapping[str, str]) -> None:
        self._commands = WordCompleter(list(commands), sentence=True, meta_dict=dict(commands))
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, event: CompleteEvent) -> Iterable[Completion]:
        """Completions of the text before the cursor."""
        name, space, path = document.text_before_cursor.partition(" ")
        if name == PATH_COMMAND and space:
            return self._paths.get_completions(Document(path), event)
        return self._commands.get_completions(document, event)


def _keys() -> KeyBindings:
    """Enter sends, Alt-Enter breaks the line, Ctrl-C discards what is typed. All other keys are as
    in Emacs and readline: Ctrl-R searches.
    """
    keys = KeyBindings()

    @keys.add("enter", filter=editing)
    def send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter", filter=editing)
    def break_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c", filter=editing & something_typed)
    def discard(event: KeyPressEvent) -> None:
        event.current_buffer.reset()

    return keys


def history_file() -> Path:
    """The file in which the user's input is saved between chats."""
    return state_folder() / "chat_history"


def history_in(file: Path) -> History:
    """The history in a file that its owner alone can read, or in memory where none can be written.
    A file of more than MAX_HISTORY_BYTES is renamed to `.old`.
    """
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file.touch(mode=0o600)
        file.chmod(0o600)
        if file.stat().st_size > MAX_HISTORY_BYTES:
            file.replace(file.with_suffix(".old"))
            file.touch(mode=0o600)
    except OSError:
        return InMemoryHistory()
    return _History(file)


class _History(FileHistory):
    def store_string(self, string: str) -> None:
        with suppress(OSError):  # a full disk does not end the chat
            super().store_string(string)
