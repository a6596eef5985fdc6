"""What runs amount to, as values for JSON and as tables for a terminal or for Markdown."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rich.table import Table as RichTable

from load_tests.client import Run


@dataclass(frozen=True, slots=True)
class Percentiles:
    """The middle and the slow end of some durations, in seconds."""

    p50: float
    p95: float
    max: float


@dataclass(frozen=True, slots=True)
class Summary:
    """One run in figures. All times in seconds, as the client saw them."""

    wall_seconds: float
    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    completion_tokens_per_second: float  # over the whole run's wall time
    first_token_seconds: Percentiles
    gap_seconds: Percentiles  # between pieces of text; a piece is mostly one token
    latency_seconds: Percentiles


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times faster we are, from runs made in pairs: median, least and greatest."""

    median: float
    least: float
    greatest: float


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


def summarize(run: Run) -> Summary:
    """Add up one run."""
    answers = run.answers
    generated = sum(a.completion_tokens for a in answers)
    return Summary(
        wall_seconds=run.wall_seconds,
        requests=len(answers),
        prompt_tokens=sum(a.prompt_tokens for a in answers),
        cached_tokens=sum(a.cached_tokens for a in answers),
        completion_tokens=generated,
        completion_tokens_per_second=generated / run.wall_seconds,
        first_token_seconds=percentiles(a.first_token_seconds for a in answers),
        gap_seconds=percentiles(gap for a in answers for gap in a.gap_seconds),
        latency_seconds=percentiles(a.latency_seconds for a in answers),
    )


def ratio(ours: Sequence[Summary], theirs: Sequence[Summary]) -> Ratio:
    """Their wall time over ours, pair by pair: above 1 we are faster. Raises on unequal counts."""
    pairs = [b.wall_seconds / a.wall_seconds for a, b in zip(ours, theirs, strict=True)]
    return Ratio(statistics.median(pairs), min(pairs), max(pairs))


def run_table(summaries: Iterable[tuple[str, Summary]]) -> Table:
    """A row for every (scenario, summary). Durations are "median / 95th percentile"."""
    columns = (
        "scenario", "wall s", "prompt", "cached", "out", "tokens/s",
        "first token s", "gap ms", "latency s",
    )  # fmt: skip
    return Table(columns, tuple((name, *_cells(s)) for name, s in summaries))


def _cells(s: Summary) -> tuple[str, ...]:
    gap = s.gap_seconds
    return (
        f"{s.wall_seconds:.2f}",
        f"{s.prompt_tokens}",
        f"{s.cached_tokens}",
        f"{s.completion_tokens}",
        f"{s.completion_tokens_per_second:.1f}",
        f"{s.first_token_seconds.p50:.2f} / {s.first_token_seconds.p95:.2f}",
        f"{gap.p50 * 1000:.0f} / {gap.p95 * 1000:.0f}",
        f"{s.latency_seconds.p50:.2f} / {s.latency_seconds.p95:.2f}",
    )


def comparison_table(
    names: tuple[str, str],
    scenarios: Iterable[tuple[str, Sequence[Summary], Sequence[Summary]]],
) -> Table:
    """A row for every (scenario, our runs, their runs): "ours / theirs" medians, and the ratio."""
    columns = (" / ".join(names), "wall s", "tokens/s", "first token s", "cached", "times faster")
    return Table(columns, tuple(_comparison_row(*scenario) for scenario in scenarios))


def _comparison_row(
    name: str, ours: Sequence[Summary], theirs: Sequence[Summary]
) -> tuple[str, ...]:
    def medians(text: str, quantity: Callable[[Summary], float]) -> str:
        sides = (statistics.median(map(quantity, side)) for side in (ours, theirs))
        return " / ".join(format(value, text) for value in sides)

    times = ratio(ours, theirs)
    return (
        name,
        medians(".2f", lambda s: s.wall_seconds),
        medians(".1f", lambda s: s.completion_tokens_per_second),
        medians(".3f", lambda s: s.first_token_seconds.p50),
        medians(".0f", lambda s: s.cached_tokens),
        f"{times.median:.2f} ({times.least:.2f}-{times.greatest:.2f})",
    )
