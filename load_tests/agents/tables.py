"""What the replays amount to."""

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from load_tests.agents.player import Exchange
from load_tests.agents.styles import Style
from load_tests.report import Table, percentile


@dataclass(frozen=True, slots=True)
class Run:
    """Two sessions through each dialect, a turn of each in turn."""

    style: Style
    exchanges: tuple[Exchange, ...]


def turn_table(style: Style, runs: Iterable[Run]) -> Table:
    """A row for each turn of the runs in a style: its prompt, and the least shares by dialect."""
    exchanges = [e for run in runs if run.style is style for e in run.exchanges]
    dialects = _dialects(exchanges)
    rows = (
        _turn_row([e for e in exchanges if e.turn == turn], dialects)
        for turn in dict.fromkeys(e.turn for e in exchanges)
    )
    return Table((f"turn, with {style.name}", "prompt", "in common", *dialects), tuple(rows))


def _turn_row(exchanges: Sequence[Exchange], dialects: Sequence[str]) -> tuple[str, ...]:
    return (
        str(exchanges[0].turn + 1),
        str(max(e.prompt_tokens for e in exchanges)),
        str(min(e.common_tokens for e in exchanges)),
        *(f"{min(e.share for e in exchanges if e.dialect == own):.2%}" for own in dialects),
    )


def summary_table(runs: Sequence[Run]) -> Table:
    """A row for each style and dialect. Tokens and seconds are of all runs together; a turn's time
    is compared with that of the same turn through the first dialect: median, 10th and 90th
    percentile. On a machine that has other work, the CPU's seconds say more.
    """
    columns = (
        "sent back", "dialect", "prompt", "cached", "least share", "seconds",
        "a turn, times the first", "CPU seconds", "times the first",
    )  # fmt: skip
    styles = dict.fromkeys(run.style for run in runs)
    rows = (
        row for style in styles for row in _style_rows([run for run in runs if run.style is style])
    )
    return Table(columns, tuple(rows))


def _style_rows(runs: Sequence[Run]) -> Iterator[tuple[str, ...]]:
    exchanges = [e for run in runs for e in run.exchanges]
    first, *_ = dialects = _dialects(exchanges)
    cpu_seconds = {d: sum(e.cpu_seconds for e in exchanges if e.dialect == d) for d in dialects}
    for dialect in dialects:
        own = [e for e in exchanges if e.dialect == dialect]
        ratios = [ratio for run in runs for ratio in _ratios(run, dialect, first)]
        yield (
            runs[0].style.name,
            dialect,
            str(sum(e.prompt_tokens for e in own)),
            str(sum(e.cached_tokens for e in own)),
            f"{min(e.share for e in own):.2%}",
            f"{sum(e.seconds for e in own):.2f}",
            f"{statistics.median(ratios):.3f} "
            f"({percentile(ratios, 10):.3f}-{percentile(ratios, 90):.3f})",
            f"{cpu_seconds[dialect]:.2f}",
            f"{cpu_seconds[dialect] / cpu_seconds[first]:.3f}",
        )


def _ratios(run: Run, dialect: str, first: str) -> list[float]:
    """Turn by turn, session by session."""
    seconds = {(e.dialect, e.seat, e.turn): e.seconds for e in run.exchanges}
    return [
        taken / seconds[first, seat, turn]
        for (own, seat, turn), taken in seconds.items()
        if own == dialect
    ]


def _dialects(exchanges: Iterable[Exchange]) -> list[str]:
    """In the order in which they were first played."""
    return list(dict.fromkeys(e.dialect for e in exchanges))
