"""A long prompt arrives while others are being answered: what it costs them, and it."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise

from load_tests.client import (
    Asker,
    Listener,
    Message,
    Target,
    TargetError,
    connected,
    exactly,
    limited,
    message,
)
from load_tests.pictures import picture
from load_tests.scenarios.kinds import Arrival
from load_tests.scenarios.workloads import text

STREAM_TOKENS = 4000  # more than anybody says until the long prompt is answered
UNDER_WAY = 8  # pieces of text, after which a stream counts as running steadily


@dataclass(frozen=True, slots=True)
class Gap:
    """A silence of one stream. Seconds; `ended` counts from when the long prompt was sent."""

    ended: float
    lasted: float


@dataclass(frozen=True, slots=True)
class Arrived:
    """One long prompt alone, and one beside the streams. Seconds, as the client saw them."""

    prompt_tokens: int
    first_token_alone: float
    first_token_beside: float
    worst_gap: float  # of any stream, between the long prompt's sending and its first token
    gaps: tuple[Gap, ...]  # of all streams in that time, as they ended

    @property
    def headline(self) -> str:
        """For a line of progress."""
        return (
            f"worst gap {self.worst_gap:.2f} s, first text after {self.first_token_beside:.2f} s, "
            f"alone {self.first_token_alone:.2f} s"
        )


async def play_arrival(scenario: Arrival, seed: int, target: Target) -> Arrived:
    """Raises TargetError. The first prompt alone is a warm-up and does not count."""
    rng = random.Random(seed)
    warm_up, alone, beside = (_long_prompt(scenario, rng) for _ in range(3))
    streams = [text(rng, scenario.stream_words) for _ in range(scenario.streams)]
    async with limited(target), connected(target) as asker:
        await asker.answered([warm_up], scenario.output_tokens)
        quiet = await asker.answered([alone], scenario.output_tokens)
        async with streaming(asker, streams) as running:
            busy = await asker.answered([beside], scenario.output_tokens)
            await running.until_said(1, since=busy.heard[0])
    gaps = running.gaps(busy.started, busy.heard[0])
    return Arrived(
        prompt_tokens=busy.usage["prompt_tokens"],
        first_token_alone=quiet.first_text_seconds,
        first_token_beside=busy.first_text_seconds,
        worst_gap=max(gap.lasted for gap in gaps),
        gaps=gaps,
    )


def _long_prompt(scenario: Arrival, rng: random.Random) -> Message:
    words = text(rng, scenario.prompt_words)
    images = [picture(rng, scenario.image_tokens) for _ in range(scenario.images)]
    return message("user", words, images)


def gaps_until(sent: float, answered: float, heard: Sequence[Sequence[float]]) -> tuple[Gap, ...]:
    """The silences of all streams that have a part between `sent` and `answered`.

    `heard` are the moments at which each stream said something.
    """
    gaps = [
        Gap(round(after - sent, 4), round(after - before, 4))
        for moments in heard
        for before, after in pairwise(moments)
        if after > sent and before < answered
    ]
    return tuple(sorted(gaps, key=lambda gap: gap.ended))


@dataclass(frozen=True, slots=True)
class Streams:
    """Answers that go on while something else is measured."""

    listeners: Sequence[Listener]
    tasks: Sequence["asyncio.Task[None]"]

    def gaps(self, since: float, until: float) -> tuple[Gap, ...]:
        """`gaps_until` of all of them."""
        return gaps_until(since, until, [one.heard for one in self.listeners])

    async def until_said(self, pieces: int, since: float = 0.0) -> None:
        """Wait until each has said that many pieces of text after the moment `since`.

        Raises TargetError if one has ended.
        """
        while any(sum(at > since for at in one.heard) < pieces for one in self.listeners):
            for task in self.tasks:
                if task.done():
                    task.result()
                    raise TargetError("a stream ended before it was to")
            await asyncio.sleep(0.01)


@asynccontextmanager
async def streaming(asker: Asker, texts: Sequence[str]) -> AsyncIterator[Streams]:
    """A stream for each text, all of them under way, which are cut at the end of the block.

    Raises TargetError if one ends before all are under way.
    """
    listeners = [Listener() for _ in texts]
    tasks = [
        asyncio.create_task(asker.ask([message("user", words)], exactly(STREAM_TOKENS), listener))
        for words, listener in zip(texts, listeners, strict=True)
    ]
    try:
        streams = Streams(listeners, tasks)
        await streams.until_said(UNDER_WAY)
        yield streams
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
