"""Tables. Cells contain untrusted text, which is never read as rich's markup."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

from rich.console import Console
from rich.table import Table
from rich.text import Text

from server.terminal.text import printable

PADDING = (0, 2, 0, 0)  # top, right, bottom, left

Cell: TypeAlias = Callable[[str], Text]
"""Makes a cell of text: `folded` or `cut`."""


def folded(text: str) -> Text:
    """Goes on in the next line where it is too long for one."""
    return Text(printable(text), overflow="fold")


def cut(text: str) -> Text:
    """Stays in its line."""
    return Text(printable(text), no_wrap=True, overflow="ellipsis")


def facts(rows: Sequence[tuple[str, str]], cell: Cell = folded) -> Table:
    """A name and a value in each line, without lines for empty values."""
    table = Table(show_header=False, box=None, padding=PADDING)
    for name, value in rows:
        if value:
            table.add_row(Text(name, style="bold"), cell(value))
    return table


def listing(heads: Sequence[str], rows: Sequence[Sequence[str]], cell: Cell = folded) -> Table:
    """A line for each row. The first column is a name, all others are figures."""
    table = Table(box=None, padding=PADDING, header_style="bold")
    for position, head in enumerate(heads):
        table.add_column(cell(head), justify="right" if position else "left")
    for row in rows:
        table.add_row(*map(cell, row))
    return table


def show(table: Table) -> None:
    Console().print(table)
