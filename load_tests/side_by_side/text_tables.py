"""Tables of the text scenarios: a row for each server, and a short table for the README."""

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from load_tests.report import Table
from load_tests.scenarios.kinds import Text
from load_tests.scenarios.real_text import Answered, Wave
from load_tests.side_by_side.record import Record
from load_tests.side_by_side.tables import ratio

REFERENCE = "mlx_lm.server"  # whose greedy texts the others are compared with

Played = dict[str, Wave]


@dataclass(frozen=True, slots=True)
class _Work:
    """One wave of a text scenario: in every round each server's, where it did not fail."""

    name: str
    description: str
    is_greedy: bool
    peers: tuple[str, ...]  # ours first
    rounds: tuple[Played, ...]

    def waves(self, peer: str) -> list[Wave]:
        return [played[peer] for played in self.rounds if peer in played]

    def median(self, peer: str, form: str, number: Callable[[Wave], float]) -> str:
        return format(statistics.median(map(number, self.waves(peer))), form)

    def times_faster(self, peer: str) -> str:
        """Ours against that server, by tokens per second: sampled answers differ in length."""
        ours = self.peers[0]
        pairs = [
            (played[ours].summary, played[peer].summary)
            for played in self.rounds
            if ours in played and peer in played
        ]
        if peer == ours or not pairs:
            return ""
        return str(ratio(pairs, lambda run: 1 / run.completion_tokens_per_second))


def text_table(records: Iterable[Record]) -> Table:
    """A row for each wave and server: medians over the rounds."""
    columns = (
        "work", "server", "wall s", "tokens/s", "first text s", "worst gap s",
        "cached", "drafts accepted", "same texts", "Rootstock is faster, times",
    )  # fmt: skip
    rows = (
        (work.name, peer, *_cells(work, peer))
        for work in _works(records)
        for peer in work.peers
        if work.waves(peer)
    )
    return Table(columns, tuple(rows))


def short_table(records: Iterable[Record]) -> Table:
    """A row for each wave: what it is, our wall time, the reference's, and the ratio."""
    columns = ("work", "Rootstock, s", f"{REFERENCE}, s", "times faster")
    rows = (
        (
            work.description,
            work.median(work.peers[0], ".1f", lambda wave: wave.summary.wall_seconds),
            work.median(REFERENCE, ".1f", lambda wave: wave.summary.wall_seconds),
            work.times_faster(REFERENCE).partition(" ")[0],
        )
        for work in _works(records)
        if work.waves(work.peers[0]) and work.waves(REFERENCE)
    )
    return Table(columns, tuple(rows))


def _works(records: Iterable[Record]) -> Iterator[_Work]:
    for record in records:
        if not isinstance(record.scenario, Text):
            continue
        for number in range(record.scenario.waves):
            again = ", again" if number else ""
            yield _Work(
                name=record.name + again,
                description=record.scenario.description + again,
                is_greedy=record.scenario.temperature == 0,
                peers=record.peers,
                rounds=tuple(
                    {
                        peer: outcome.waves[number]
                        for peer, outcome in played.items()
                        if isinstance(outcome, Answered)
                    }
                    for played in record.results.rounds
                ),
            )


def _cells(work: _Work, peer: str) -> tuple[str, ...]:
    waves = work.waves(peer)
    return (
        work.median(peer, ".1f", lambda wave: wave.summary.wall_seconds),
        work.median(peer, ".1f", lambda wave: wave.summary.completion_tokens_per_second),
        work.median(peer, ".2f", lambda wave: wave.summary.first_token_seconds.p50),
        work.median(peer, ".2f", lambda wave: wave.summary.gap_seconds.max),
        work.median(peer, ".0%", lambda w: w.summary.cached_tokens / w.summary.prompt_tokens),
        _drafts(waves),
        _same_texts(work, peer) if work.is_greedy and peer != REFERENCE else "",
        work.times_faster(peer),
    )


def _drafts(waves: Sequence[Wave]) -> str:
    """Accepted of verified draft tokens, in all rounds; empty where the server has none."""
    accepted, drafted = (
        sum(wave.accepted_tokens for wave in waves),
        sum(wave.drafted_tokens for wave in waves),
    )
    return f"{accepted:,} of {drafted:,}" if drafted else ""


def _same_texts(work: _Work, peer: str) -> str:
    """How many answers, of all rounds, are the reference's in the same round."""
    pairs = [
        pair
        for played in work.rounds
        if peer in played and REFERENCE in played
        for pair in zip(played[peer].answers, played[REFERENCE].answers, strict=True)
    ]
    return f"{sum(a == b for a, b in pairs)} of {len(pairs)}" if pairs else ""
