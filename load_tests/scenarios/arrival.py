"""A long prompt arrives while others are being answered: what it costs them, and it."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from load_tests.client import Asker, Listener, Target, TargetError, connected, limited, message
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
    warm_up, alone, beside = (text(rng, scenario.prompt_words) for _ in range(3))
    streams = [text(rng, scenario.stream_words) for _ in range(scenario.streams)]
    async with limited(target), connected(target) as asker:
        await _ask(asker, warm_up, scenario.output_tokens)
        quiet = await _ask(asker, alone, scenario.output_tokens)
        busy, listeners = await _beside(asker, beside, scenario.output_tokens, streams)
    gaps = gaps_until(busy.started, busy.heard[0], [one.heard for one in listeners])
    return Arrived(
        prompt_tokens=busy.usage["prompt_tokens"],
        first_token_alone=quiet.heard[0] - quiet.started,
        first_token_beside=busy.heard[0] - busy.started,
        worst_gap=max(gap.lasted for gap in gaps),
        gaps=gaps,
    )


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


async def _ask(asker: Asker, prompt: str, output_tokens: int) -> Listener:
    listener = Listener()
    await asker.ask([message("user", prompt)], output_tokens, listener)
    if not listener.heard:
        raise TargetError("the long prompt was not answered")
    return listener


async def _beside(
    asker: Asker, prompt: str, output_tokens: int, stream_texts: Sequence[str]
) -> tuple[Listener, list[Listener]]:
    """Ask while the streams run; cut them when each has said something after the answer began."""
    listeners = [Listener() for _ in stream_texts]
    streams = [
        asyncio.create_task(asker.ask([message("user", words)], STREAM_TOKENS, listener))
        for words, listener in zip(stream_texts, listeners, strict=True)
    ]
    try:
        await _until_said(streams, listeners, UNDER_WAY)
        busy = await _ask(asker, prompt, output_tokens)
        await _until_said(streams, listeners, 1, since=busy.heard[0])
    finally:
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    return busy, listeners


async def _until_said(
    streams: Sequence["asyncio.Task[None]"],
    listeners: Sequence[Listener],
    pieces: int,
    since: float = 0.0,
) -> None:
    """Each stream has said so many pieces after the moment. Raises TargetError if one has ended."""
    while any(sum(moment > since for moment in one.heard) < pieces for one in listeners):
        for stream in streams:
            if stream.done():
                stream.result()
                raise TargetError("a stream ended before the long prompt was answered")
        await asyncio.sleep(0.01)
