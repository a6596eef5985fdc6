"""The figures for people."""

import statistics
from collections.abc import Iterable, Sequence

from load_tests.drafts.rounds import Measured
from load_tests.report import Table

COLUMNS = (
    "load",
    "model",
    "streams",
    "tok/s off",
    "on",
    "ratio",
    "noise",
    "asked",
    "right",
    "wrong",
)


def table(all_measured: Iterable[Measured]) -> Table:
    """A row for each load: medians, and of ratios the least and the greatest, too. Noise is the
    ratio of two turns without drafts. Right and wrong are draft tokens, as shares of the output's.
    """
    return Table(COLUMNS, tuple(map(_row, all_measured)))


def _row(measured: Measured) -> tuple[str, ...]:
    rounds = measured.rounds
    ratios = [each.ratio for each in rounds]
    drafted = [each.drafted for each in rounds]
    return (
        measured.name,
        measured.model,
        str(measured.streams),
        f"{statistics.median(each.plain.tokens_per_second for each in rounds):,.0f}",
        f"{statistics.median(turn.tokens_per_second for turn in drafted):,.0f}",
        f"{measured.ratio:.2f} ({min(ratios):.2f}-{max(ratios):.2f})",
        f"{measured.noise:.2f}",
        f"{measured.least:.2f}" if measured.least else "",
        _share([turn.accepted for turn in drafted], [turn.output_tokens for turn in drafted]),
        _share([turn.rejected for turn in drafted], [turn.output_tokens for turn in drafted]),
    )


def _share(parts: Sequence[int], wholes: Sequence[int]) -> str:
    """Of the output tokens of all rounds."""
    return f"{sum(parts) / sum(wholes):.0%}"
