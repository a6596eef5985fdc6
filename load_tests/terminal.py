"""What the commands print."""

from collections.abc import Sequence
from pathlib import Path

from pydantic_core import to_json
from rich.console import Console

from load_tests.conditions import Conditions
from load_tests.report import Table


def show(conditions: Conditions, markdown: bool, *tables: Table) -> None:
    """The tables and how they came about."""
    console = Console()
    for table in tables:
        if markdown:
            print(table.markdown(), end="\n\n")
        else:
            console.print(table.rich())
    for line in conditions.lines():
        if markdown:
            print(f"- `{line}`")
        else:
            console.print(line, highlight=False)


def show_figures(table: Table, figures: Sequence[object], json_path: Path | None) -> None:
    """The table; what it is made of, dataclasses, goes to a file as JSON where one is named."""
    Console(width=100).print(table.rich())
    if json_path is not None:
        json_path.write_bytes(to_json(figures, indent=2))


def fail(message: str) -> int:
    """Say what is wrong; the exit status for it."""
    Console(stderr=True).print(message, style="red", markup=False)
    return 1
