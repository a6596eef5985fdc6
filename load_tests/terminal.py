"""What the commands print."""

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


def fail(message: str) -> int:
    """Say what is wrong; the exit status for it."""
    Console(stderr=True).print(message, style="red", markup=False)
    return 1
