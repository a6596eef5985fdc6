"""Tables. Cells contain untrusted text, which is never read as rich's markup."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from server.terminal.text import printable

PADDING = (0, 2, 0, 0)  # top, right, bottom, left


def facts(rows: Sequence[tuple[str, str]]) -> Table:
    """A name and a value in each line, without lines for empty values."""
    table = Table(show_header=False, box=None, padding=PADDING)
    for name, value in rows:
        if value:
            table.add_row(Text(name, style="bold"), _cell(value))
    return table


def listing(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A line for each row. The first column is a name, all others are figures."""
    table = Table(box=None, padding=PADDING, header_style="bold")
    for position, head in enumerate(heads):
        table.add_column(head, justify="right" if position else "left")
    for row in rows:
        table.add_row(*map(_cell, row))
    return table


def show(table: Table) -> None:
    Console().print(table)


def _cell(text: str) -> Text:
    return Text(printable(text), overflow="fold")
