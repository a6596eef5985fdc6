"""A command's side of the terminal: safe text, tables, errors, signals, a folder for its files, and
the name of the command.

Text of a model, a server or a file name is untrusted. It is printed without control characters, and
never read as rich's markup.
"""

import shlex
import shutil
import signal
import sys
import termios
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from io import TextIOWrapper
from operator import attrgetter
from pathlib import Path
from types import FrameType
from typing import TypeAlias

import typer
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from engine.values.stats import ModelMemory, readable_bytes

# C0, DEL and C1, but for newline and tab: https://www.unicode.org/charts/PDF/U0080.pdf
CONTROL_CHARACTERS = dict.fromkeys({*range(0x20), *range(0x7F, 0xA0)} - set(map(ord, "\n\t")))
UNITS = {"TiB": 2**40, "GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
LEAST_OTHERS_BYTES = 2**20
"""Other models' share of a disk cache is shown from this size on: directories alone take less."""

NAMES = ("rootstock", "rootstock-serve")
"""The command's name, and its second one, for where another program has the first."""

ID_CHARACTERS = 8

PADDING = (0, 2, 0, 0)  # top, right, bottom, left
TERMINAL_ENDS = frozenset({signal.SIGTERM, signal.SIGHUP})

Cell: TypeAlias = Callable[[str], Text]
"""Makes a table's cell of text: `folded` or `cut`."""


class TerminalError(Exception):
    """A command failed. The text says why, in one line for the user."""


class KeyRefused(TerminalError):
    """The server refuses the API key (401, 403)."""


class NotFound(TerminalError):
    """The server does not have the path (404)."""


class NotLoaded(TerminalError):
    """The daemon has the model, but not in memory."""


class Starting(TerminalError):
    """The daemon does not serve yet: it loads its models."""


@contextmanager
def errors_printed(*others: type[Exception]) -> Iterator[None]:
    """Print a TerminalError, or an error of another of these types, as a line on standard error,
    and exit with status 1.
    """
    kinds: tuple[type[Exception], ...] = (TerminalError, *others)
    try:
        yield
    except kinds as error:
        print_error(str(error))
        raise typer.Exit(1) from None


def print_error(text: str) -> None:
    """Print an error on standard error, with commands as they can be typed here."""
    typer.echo(f"error: {typeable(printable(text))}", err=True)


def command_name() -> str:
    """The command that runs `rootstock` here: its name if the shell finds it, else its path in this
    environment, such as `.venv/bin/rootstock` in a clone.
    """
    ours = Path(sys.executable).with_name(NAMES[0])
    for name in NAMES:
        found = shutil.which(name)
        if found is not None and Path(found).resolve() == ours.with_name(name).resolve():
            return name
    if not ours.exists():
        return NAMES[0]
    path = ours.relative_to(Path.cwd()) if ours.is_relative_to(Path.cwd()) else ours
    return shlex.quote(str(path))


def typeable(text: str) -> str:
    """The text with each command in it, such as `rootstock ps`, as it can be typed here."""
    begins = f"`{NAMES[0]} "
    return text.replace(begins, f"`{command_name()} ") if begins in text else text


def printable(text: str) -> str:
    """The text without control characters other than newline and tab."""
    return text.translate(CONTROL_CHARACTERS)


def bytes_text(n_bytes: int) -> str:
    """A size in the largest unit that it fills, such as `1.50 GiB`."""
    for unit, size in UNITS.items():
        if n_bytes >= size:
            return f"{n_bytes / size:.2f} {unit}"
    return f"{n_bytes} bytes"


def counted(count: int, noun: str) -> str:
    """A number of things, such as `1 answer` and `2 answers`."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def age_text(seconds: float) -> str:
    """A time in the largest unit that it fills, such as `12 min`."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"


def id_text(request_id: str) -> str:
    """The beginning of a request's id, enough to find it in the log, and which of its sequences it
    is if there are several, such as `1a2b3c4d#1`.
    """
    name, mark, index = request_id.partition("#")
    return f"{name[:ID_CHARACTERS]}{mark}{index}"


def state_text(state: str, reason: str | None) -> str:
    """A request's state, with the reason if it waits."""
    return f"{state}: {reason}" if reason else state


def fullness_text(used_bytes: int, shared_bytes: int, limit_bytes: int) -> str:
    """The use of a disk cache: one model's bytes, the limit for all models, and the bytes of the
    other models. `shared_bytes` counts all models.
    """
    others = shared_bytes - used_bytes
    others_text = f", other models {bytes_text(others)}" if others >= LEAST_OTHERS_BYTES else ""
    return f"{bytes_text(used_bytes)} of {bytes_text(limit_bytes)}{others_text}"


def replace_bad_text() -> None:
    """Replace characters that the locale's encoding lacks by `?` or U+FFFD, instead of raising."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")


def folded(text: str) -> Text:
    """A cell whose text continues in the next line where it is too long for one."""
    return Text(printable(text), overflow="fold")


def cut(text: str) -> Text:
    """A cell whose text is cut short where it is too long for one line."""
    return Text(printable(text), no_wrap=True, overflow="ellipsis")


def facts(rows: Sequence[tuple[str, str]], cell: Cell = folded) -> Table:
    """A table of names and values, one to a line, without the lines of empty values."""
    table = Table(show_header=False, box=None, padding=PADDING)
    for name, value in rows:
        if value:
            table.add_row(Text(name, style="bold"), cell(value))
    return table


def listing(heads: Sequence[str], rows: Sequence[Sequence[str]], cell: Cell = folded) -> Table:
    """A table with a head. The first column is a name, all others are figures."""
    table = Table(box=None, padding=PADDING, header_style="bold")
    for position, head in enumerate(heads):
        table.add_column(cell(head), justify="right" if position else "left")
    for row in rows:
        table.add_row(*map(cell, row))
    return table


MEMORY_HEADS = ("memory", "weights", "KV", "states", "workspace", "events", "process", "in all")


def memory_listing(models: Sequence[tuple[str, ModelMemory]]) -> Table:
    """The parts of each model's memory: five as planned, then the memory of its process, if it has
    one, and the bytes charged to a budget.
    """
    planned = "weights_bytes", "kv_bytes", "states_bytes", "workspace_bytes", "events_bytes"
    parts = attrgetter(*planned)
    rows = []
    for name, memory in models:
        sizes = (*parts(memory), memory.process_bytes, memory.total_bytes)
        rows.append((name, *(readable_bytes(size) if size else "-" for size in sizes)))
    return listing(MEMORY_HEADS, rows)


def show(*tables: RenderableType) -> None:
    """Print the tables on standard output."""
    Console().print(*tables, sep="")


@contextmanager
def exiting_on(signals: Set[signal.Signals]) -> Iterator[None]:
    """Turn the signals into SystemExit while the block runs, so that contexts are left in order.

    A signal that is ignored, as nohup arranges for SIGHUP, stays ignored.
    """
    before = {number: signal.getsignal(number) for number in signals}
    handled = [number for number, handler in before.items() if handler != signal.SIG_IGN]
    for number in handled:
        signal.signal(number, _exit)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, before[number])


def _exit(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


@contextmanager
def terminal_restored(descriptor: int) -> Iterator[None]:
    """Restore the settings of the terminal at this file descriptor when the block ends. A signal
    may arrive while a prompt changes them, before the prompt knows what to undo.
    """
    before = termios.tcgetattr(descriptor)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
