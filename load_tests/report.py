"""Percentiles, and tables for a terminal or for Markdown."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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


def percentile(values: Sequence[float], q: float) -> float:
    """The q-th percentile (0..100), linear between neighbours; 0 of nothing.

    Definition 7 of Hyndman and Fan, "Sample Quantiles in Statistical Packages" (1996).
    """
    if not values:
        return 0.0
    ordered = sorted(values)
    place = (len(ordered) - 1) * q / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def percentiles(values: Iterable[float]) -> Percentiles:
    """The three percentiles that tables show."""
    known = tuple(values)
    return Percentiles(percentile(known, 50), percentile(known, 95), percentile(known, 100))
