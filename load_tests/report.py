"""Percentiles, and tables for a terminal or for Markdown."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from rich.table import Table as RichTable


@dataclass(frozen=True, slots=True)
class Percentiles:
    """The middle and the slow end of some durations, in seconds."""

    p50: float
    p95: float
    max: float


@dataclass(frozen=True, slots=True)
class Table:
    """Column names and rows of text."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        """The table in GitHub's Markdown, numbers aligned to the right."""
        rule = ("---", *("---:" for _ in self.columns[1:]))
        lines = (self.columns, rule, *self.rows)
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)

    def rich(self) -> RichTable:
        """The table for a terminal."""
        table = RichTable()
        for i, column in enumerate(self.columns):
            table.add_column(column, justify="right" if i else "left")
        for row in self.rows:
            table.add_row(*row)
        return table


def percentiles(values: Iterable[float]) -> Percentiles:
    """The percentiles that tables show, linear between neighbours; 0 of nothing."""
    known = tuple(values)
    if not known:
        return Percentiles(0.0, 0.0, 0.0)
    return Percentiles(*map(float, np.percentile(known, (50, 95, 100))))
