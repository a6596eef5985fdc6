"""Rounds of a load: with drafts, without, and without again, the order changed each time."""

import statistics
from dataclasses import dataclass
from itertools import permutations, takewhile, zip_longest

import httpx

from load_tests.drafts.loads import Load
from load_tests.drafts.play import Player, Turn

LIMIT_SECONDS = 900.0
AROUND = 40  # characters shown of answers that differ


@dataclass(frozen=True, slots=True)
class Effort:
    """How many rounds are measured, and how many are played before these."""

    rounds: int
    warm_ups: int


@dataclass(frozen=True, slots=True)
class Round:
    """A load, once with drafts and twice without."""

    drafted: Turn
    plain: Turn
    again: Turn

    @property
    def ratio(self) -> float:
        """Of output tokens a second, with drafts to without."""
        return self.drafted.tokens_per_second / self.plain.tokens_per_second

    @property
    def noise(self) -> float:
        """The same of the two turns without: what they differ by is no draft's."""
        return self.again.tokens_per_second / self.plain.tokens_per_second


@dataclass(frozen=True, slots=True)
class Measured:
    """What became of one load's rounds. `differences`: answers that drafts have changed."""

    name: str
    model: str
    streams: int
    least: float | None
    rounds: tuple[Round, ...]
    differences: tuple[str, ...]

    @property
    def title(self) -> str:
        return f"{self.name}, {self.model}, {self.streams} at once"

    @property
    def headline(self) -> str:
        """For a line of progress."""
        return f"{self.title}: {self.ratio:.2f} times as fast"

    @property
    def ratio(self) -> float:
        return statistics.median(each.ratio for each in self.rounds)

    @property
    def noise(self) -> float:
        return statistics.median(each.noise for each in self.rounds)


async def measure(url: str, load: Load, effort: Effort) -> Measured:
    """Play the load so often. Raises TargetError."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=url, timeout=LIMIT_SECONDS, limits=limits, trust_env=False
    ) as http:
        played = [await _round(http, load, i) for i in range(effort.warm_ups + effort.rounds)]
    different = [line for each in played for line in differences(each)]
    return Measured(
        name=load.name,
        model=load.model,
        streams=len(load.streams),
        least=load.least,
        rounds=tuple(played[effort.warm_ups :]),
        differences=tuple(dict.fromkeys(different)),
    )


async def _round(http: httpx.AsyncClient, load: Load, number: int) -> Round:
    """In each of the six orders in turn."""
    turns = dict[str, Turn]()
    orders = list(permutations(("drafted", "plain", "again")))
    for name in orders[number % len(orders)]:
        salt = f"{load.name}/{len(load.streams)}/{number}/{name}"
        turns[name] = await Player(http, salt, speculate=name == "drafted").play(load)
    return Round(**turns)


def differences(each: Round) -> list[str]:
    """A line for each answer that is not the same with drafts as without."""
    pairs = zip_longest(each.drafted.answers, each.plain.answers)
    return [
        _difference(number, drafted.said, plain.said)
        for number, (drafted, plain) in enumerate(pairs)
        if (drafted.said, drafted.output_tokens) != (plain.said, plain.output_tokens)
    ]


def _difference(number: int, drafted: str, plain: str) -> str:
    same = takewhile(lambda pair: pair[0] == pair[1], zip(drafted, plain, strict=False))
    place = len(list(same))
    shown = [repr(said[max(place - AROUND, 0) : place + AROUND]) for said in (drafted, plain)]
    return f"answer {number}, from character {place} on: {shown[0]} with drafts, {shown[1]} without"
