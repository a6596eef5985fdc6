"""Records as tables: ours beside each of the others."""

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from load_tests.report import Table
from load_tests.scenarios.arrival import Arrived
from load_tests.scenarios.comeback import Back, CameBack, Crowd
from load_tests.scenarios.kinds import Load
from load_tests.scenarios.load import Summary
from load_tests.scenarios.restart import Restarted
from load_tests.side_by_side.record import Record

T = TypeVar("T")
Number = Callable[[T], float]


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times more of something: median, least and greatest over the rounds."""

    median: float
    least: float
    greatest: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.least:.2f}-{self.greatest:.2f})"


def ratio(pairs: Sequence[tuple[T, T]], number: Number[T]) -> Ratio:
    """Theirs over ours, round by round: of times, above 1 we are faster. Raises on no pairs."""
    found = [number(theirs) / number(ours) for ours, theirs in pairs]
    return Ratio(statistics.median(found), min(found), max(found))


def tables(records: Iterable[Record]) -> list[Table]:
    """One for each kind of outcome that the records have."""
    kept = list(records)
    made = (
        *(load_table(kept), image_table(kept), arrival_table(kept)),
        *(restart_table(kept), comeback_table(kept), crowd_table(kept)),
    )
    return [table for table in made if table.rows]


def load_table(records: Iterable[Record]) -> Table:
    """A row for each load and each of the others: "ours / theirs" medians, and ratios."""
    columns = (
        "scenario", "compared with", "wall s", "tokens/s", "first text s", "cached",
        "times faster", "first text, times faster",
    )  # fmt: skip
    rows = (
        (record.name, other, *_load_cells(pairs))
        for record in records
        for other, pairs in _beside(record, Summary)
    )
    return Table(columns, tuple(rows))


def _load_cells(pairs: Sequence[tuple[Summary, Summary]]) -> tuple[str, ...]:
    return (
        _medians(".2f", pairs, lambda run: run.wall_seconds),
        _medians(".1f", pairs, lambda run: run.completion_tokens_per_second),
        _medians(".3f", pairs, lambda run: run.first_token_seconds.p50),
        _medians(",.0f", pairs, lambda run: run.cached_tokens),
        str(ratio(pairs, lambda run: run.wall_seconds)),
        str(ratio(pairs, lambda run: run.first_token_seconds.p50)),
    )


def image_table(records: Iterable[Record]) -> Table:
    """A row for each server that was sent images: medians over the rounds. `possible` is what the
    turn before had, for all turns but the first.
    """
    columns = (
        "scenario", "server", "prompt", "cached", "of possible", "images encoded",
        "slowest first text s",
    )  # fmt: skip
    rows = (
        (record.name, peer, *_image_cells(runs))
        for record in records
        if isinstance(record.scenario, Load) and record.scenario.image_sets
        for peer, runs in runs_of(record, Summary)
    )
    return Table(columns, tuple(rows))


def _image_cells(runs: Sequence[Summary]) -> tuple[str, ...]:
    def median(form: str, number: Number[Summary]) -> str:
        return format(statistics.median(map(number, runs)), form)

    is_possible = all(run.earlier_tokens for run in runs)
    encoded = [run.encoded_images for run in runs if run.encoded_images is not None]
    return (
        median(",.0f", lambda run: run.prompt_tokens),
        median(",.0f", lambda run: run.cached_tokens),
        median(".1%", lambda run: run.resumed_tokens / run.earlier_tokens) if is_possible else "",
        f"{statistics.median(encoded):.0f}" if encoded else "",
        median(".2f", lambda run: run.first_token_seconds.max),
    )


def arrival_table(records: Iterable[Record]) -> Table:
    """A row for each server that met the long prompt: medians over the rounds."""
    columns = (
        "scenario",
        "server",
        "worst gap s",
        "first text alone s",
        "next to streams s",
        "ratio",
    )
    rows = (
        (record.name, peer, *_arrival_cells(runs))
        for record in records
        for peer, runs in runs_of(record, Arrived)
    )
    return Table(columns, tuple(rows))


def _arrival_cells(runs: Sequence[Arrived]) -> tuple[str, ...]:
    def median(number: Number[Arrived]) -> str:
        return f"{statistics.median(map(number, runs)):.2f}"

    return (
        median(lambda run: run.worst_gap),
        median(lambda run: run.first_token_alone),
        median(lambda run: run.first_token_beside),
        median(lambda run: run.first_token_beside / run.first_token_alone),
    )


def restart_table(records: Iterable[Record]) -> Table:
    """A row for each prompt and ending: medians over the rounds."""
    columns = (
        "scenario", "prompt", "restart", "prompt tokens", "cached",
        "of memory hits", "cold s", "again s", "times faster", "same text",
    )  # fmt: skip
    rows = (
        (record.name, one.prompt, one.ending, *_resent_cells(runs, place))
        for record in records
        for _, runs in runs_of(record, Restarted)
        for place, one in enumerate(runs[0].resent)
    )
    return Table(columns, tuple(rows))


def comeback_table(records: Iterable[Record]) -> Table:
    """A row for each prompt and ending: medians over the rounds."""
    columns = (
        "scenario", "streams", "restart", "prompt tokens", "cached",
        "cold s", "again s", "at the disk's rate s", "median gap alone ms", "worst gap ms",
    )  # fmt: skip
    rows = (
        (record.name, str(one.streams), one.ending, *_back_cells(runs, place))
        for record in records
        for _, runs in runs_of(record, CameBack)
        for place, one in enumerate(runs[0].backs)
    )
    return Table(columns, tuple(rows))


def _back_cells(runs: Sequence[CameBack], place: int) -> tuple[str, ...]:
    found = [(run, run.backs[place]) for run in runs]

    def median(form: str, number: Callable[[Back], float]) -> str:
        return format(statistics.median(number(back) for _, back in found), form)

    limit = statistics.median(run.limit_seconds(back) for run, back in found)
    return (
        f"{found[0][1].prompt_tokens:,}",
        median(".1%", lambda back: back.cached_share),
        median(".2f", lambda back: back.cold_seconds),
        median(".2f", lambda back: back.again_seconds),
        f"{limit:.2f}",
        median(".0f", lambda back: 1e3 * back.calm_gap),
        median(".0f", lambda back: 1e3 * back.worst_gap),
    )


def crowd_table(records: Iterable[Record]) -> Table:
    """A row for each crowd: medians over the rounds."""
    columns = (
        "scenario", "prompts at once", "of a daemon after", "first s, cold / again",
        "last s, cold / again", "most that was held, MiB more",
    )  # fmt: skip
    rows = (
        (record.name, *_crowd_cells([run.crowds[place] for run in runs]))
        for record in records
        for _, runs in runs_of(record, CameBack)
        for place in range(len(runs[0].crowds))
    )
    return Table(columns, tuple(rows))


def _crowd_cells(crowds: Sequence[Crowd]) -> tuple[str, ...]:
    def median(number: Callable[[Crowd], float]) -> float:
        return statistics.median(map(number, crowds))

    def both(place: int) -> str:
        cold = median(lambda crowd: crowd.cold_seconds[place])
        return f"{cold:.2f} / {median(lambda crowd: crowd.again_seconds[place]):.2f}"

    more = median(lambda crowd: crowd.most_bytes - crowd.before_bytes)
    n_prompts, ending = len(crowds[0].cold_seconds), crowds[0].ending
    return str(n_prompts), ending, both(0), both(-1), f"{more / 2**20:,.0f}"


def _resent_cells(runs: Sequence[Restarted], place: int) -> tuple[str, ...]:
    found = [run.resent[place] for run in runs]
    cold = statistics.median(one.cold_seconds for one in found)
    again = statistics.median(one.again_seconds for one in found)
    sooner = statistics.median(one.cold_seconds / one.again_seconds for one in found)
    same = sum(one.is_same_text for one in found)
    return (
        f"{found[0].prompt_tokens:,}",
        f"{statistics.median(one.cached_tokens for one in found):,.0f}",
        f"{statistics.median(run.share(run.resent[place]) for run in runs):.1%}",
        *(f"{cold:.2f}", f"{again:.3f}", f"{sooner:.1f}", f"{same} of {len(found)}"),
    )


def runs_of(record: Record, kind: type[T]) -> Iterator[tuple[str, list[T]]]:
    """Each server's runs of that kind of outcome; servers without any are left out."""
    for peer in record.peers:
        found = [played.get(peer) for played in record.results.rounds]
        if runs := [run for run in found if isinstance(run, kind)]:
            yield peer, runs


def _beside(record: Record, kind: type[T]) -> Iterator[tuple[str, list[tuple[T, T]]]]:
    """For each of the others the rounds that it and we came through, as (ours, theirs)."""
    ours, *others = record.peers
    for other in others:
        found = [(played.get(ours), played.get(other)) for played in record.results.rounds]
        pairs = [(a, b) for a, b in found if isinstance(a, kind) and isinstance(b, kind)]
        if pairs:
            yield other, pairs


def _medians(form: str, pairs: Sequence[tuple[T, T]], number: Number[T]) -> str:
    sides = zip(*pairs, strict=True)
    return " / ".join(format(statistics.median(map(number, side)), form) for side in sides)
