"""Rounds of a load: with drafts and without, the order changed each time."""

import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile, zip_longest

import httpx

from load_tests.drafts.loads import Load
from load_tests.drafts.play import Player, Turn

LIMIT_SECONDS = 900.0
AROUND = 40  # characters shown of answers that differ


@dataclass(frozen=True, slots=True)
class Round:
    """A load, once with drafts and once without."""

    drafted: Turn
    plain: Turn

    @property
    def ratio(self) -> float:
        """Of output tokens a second."""
        return self.drafted.tokens_per_second / self.plain.tokens_per_second


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
        return f"{self.name}, {self.model}, {self.streams} streams"

    @property
    def ratio(self) -> float:
        return statistics.median(each.ratio for each in self.rounds)


async def measure(url: str, load: Load, n_rounds: int) -> Measured:
    """Play the load so often, and once before to warm up. Raises TargetError."""
    async with httpx.AsyncClient(
        base_url=url, timeout=LIMIT_SECONDS, limits=httpx.Limits(max_connections=None)
    ) as http:
        warm_up = await _round(http, load, -1)
        rounds = [await _round(http, load, number) for number in range(n_rounds)]
    different = [line for each in (warm_up, *rounds) for line in differences(each)]
    n_streams = len(load.streams)
    return Measured(
        load.name, load.model, n_streams, load.least, tuple(rounds), tuple(dict.fromkeys(different))
    )


async def _round(http: httpx.AsyncClient, load: Load, number: int) -> Round:
    turns: dict[bool, Turn] = {}
    for speculate in (number % 2 == 0, number % 2 == 1):
        salt = f"{load.name}/{len(load.streams)}/{number}/{speculate}"
        turns[speculate] = await Player(http, salt, speculate).play(load)
    return Round(turns[True], turns[False])


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


def measure_all(url: str, loads: Sequence[Load], n_rounds: int) -> list[Measured]:
    return [asyncio.run(measure(url, load, n_rounds)) for load in loads]
