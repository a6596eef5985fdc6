"""Long prompts come back to the next daemon: alone, beside streams, and as a crowd."""

import asyncio
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from kvstore.disk.store import verify
from load_tests.client import Asker, Listener, connected, limited, message
from load_tests.peers.catalogue import Server
from load_tests.scenarios.arrival import Streams, streaming
from load_tests.scenarios.kinds import Comeback
from load_tests.scenarios.restart import Ending, Start, end
from load_tests.scenarios.workloads import text

ENDINGS: tuple[Ending, ...] = ("SIGTERM", "SIGKILL")
CALM_SECONDS = 4.0  # in which nothing happens but the streams
END_SECONDS = 90.0  # what is not on disk yet has a minute of it
POLL_SECONDS = 0.05
LIFE_SECONDS = 3600.0  # a prompt of 24,000 tokens that nobody has computed takes minutes on a CPU


@dataclass(frozen=True, slots=True)
class Back:
    """One prompt that came back. Seconds to first tokens, cold with nobody else there."""

    ending: Ending
    streams: int  # beside it
    prompt_tokens: int
    cached_tokens: int
    cold_seconds: float
    again_seconds: float
    calm_gap: float  # the streams' median before it came; 0 without streams
    worst_gap: float  # of the streams, until its first token

    @property
    def cached_share(self) -> float:
        return self.cached_tokens / self.prompt_tokens


@dataclass(frozen=True, slots=True)
class Crowd:
    """Many at once. Seconds to their first tokens, sorted, and bytes that the daemon held."""

    ending: Ending
    cold_seconds: tuple[float, ...]
    again_seconds: tuple[float, ...]
    before_bytes: int
    most_bytes: int


@dataclass(frozen=True, slots=True)
class CameBack:
    """`disk_rate`: bytes a second that were read and checked of all that was written."""

    token_bytes: int
    disk_rate: float
    backs: tuple[Back, ...]
    crowds: tuple[Crowd, ...]

    @property
    def headline(self) -> str:
        """For a line of progress."""
        least = min(back.cached_share for back in self.backs)
        sooner = statistics.median(back.cold_seconds / back.again_seconds for back in self.backs)
        return f"at least {least:.1%} cached, first text {sooner:.1f} times sooner than cold"

    def limit_seconds(self, back: Back) -> float:
        """What the disk's rate allows for a first token, by half as much again and 0.3 s."""
        return 1.5 * back.cached_tokens * self.token_bytes / self.disk_rate + 0.3


@dataclass(frozen=True, slots=True)
class _Texts:
    """For each length a prompt that comes back alone, and one that does beside streams."""

    alone: tuple[str, ...]
    beside: tuple[str, ...]
    crowd: tuple[str, ...]
    streams: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Asked:
    listener: Listener
    calm_gap: float = 0.0
    worst_gap: float = 0.0


@dataclass(frozen=True, slots=True)
class _Life:
    """What one daemon was asked, in the order of lengths."""

    alone: tuple[_Asked, ...]
    beside: tuple[_Asked, ...]
    crowd: tuple[float, ...]
    before_bytes: int
    most_bytes: int


def play_comeback(scenario: Comeback, seed: int, start: Start) -> CameBack:
    """Each ending with an empty disk. Raises TargetError."""
    rng = random.Random(seed)
    backs, crowds = list[Back](), list[Crowd]()
    n_bytes, seconds = 0, 0.0
    for ending in ENDINGS:
        texts = _texts(scenario, rng)
        with TemporaryDirectory(prefix="home-") as home:
            with start(Path(home)) as server:
                cold = asyncio.run(_live(scenario, server, replace(texts, streams=())))
                end(server, ending, scenario.idle_seconds, END_SECONDS)
            begun = time.perf_counter()
            found = list(verify(Path(home) / "kv"))
            seconds += time.perf_counter() - begun
            n_bytes += sum(one.n_bytes for one in found)
            with start(Path(home)) as server:
                again = asyncio.run(_live(scenario, server, texts))
        backs += _backs(ending, cold, again, scenario.streams)
        crowds.append(Crowd(ending, cold.crowd, again.crowd, again.before_bytes, again.most_bytes))
    return CameBack(scenario.token_bytes, n_bytes / seconds, tuple(backs), tuple(crowds))


def _texts(scenario: Comeback, rng: random.Random) -> _Texts:
    def of_all_lengths() -> tuple[str, ...]:
        return tuple(text(rng, words) for words in scenario.prompt_words)

    return _Texts(
        alone=of_all_lengths(),
        beside=of_all_lengths(),
        crowd=tuple(text(rng, scenario.crowd_words) for _ in range(scenario.crowd)),
        streams=tuple(text(rng, scenario.stream_words) for _ in range(scenario.streams)),
    )


def _backs(ending: Ending, cold: _Life, again: _Life, streams: int) -> Iterator[Back]:
    pairs = [(0, *pair) for pair in zip(cold.alone, again.alone, strict=True)]
    pairs += [(streams, *pair) for pair in zip(cold.beside, again.beside, strict=True)]
    for beside, first, second in pairs:
        usage = second.listener.usage
        yield Back(
            ending,
            beside,
            prompt_tokens=usage["prompt_tokens"],
            cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
            cold_seconds=first.listener.first_text_seconds,
            again_seconds=second.listener.first_text_seconds,
            calm_gap=second.calm_gap,
            worst_gap=second.worst_gap,
        )


async def _live(scenario: Comeback, server: Server, texts: _Texts) -> _Life:
    """Ask all of it of one daemon."""
    memory = psutil.Process(server.process.pid).memory_info
    target = replace(server.target, limit_seconds=LIFE_SECONDS, stall_seconds=LIFE_SECONDS)
    async with limited(target), connected(target) as asker:

        async def ask(words: str) -> Listener:
            return await asker.answered([message("user", words)], scenario.output_tokens)

        alone = [_Asked(await ask(words)) for words in texts.alone]
        async with streaming(asker, texts.streams) as streams:
            found = [
                await _beside(asker, streams, words, scenario.output_tokens)
                for words in texts.beside
            ]
        before_bytes = most_bytes = memory().rss
        crowd = asyncio.gather(*map(ask, texts.crowd))
        while not crowd.done():
            most_bytes = max(most_bytes, memory().rss)
            await asyncio.sleep(POLL_SECONDS)
        seconds = sorted(listener.first_text_seconds for listener in await crowd)
    return _Life(tuple(alone), tuple(found), tuple(seconds), before_bytes, most_bytes)


async def _beside(asker: Asker, streams: Streams, prompt: str, output_tokens: int) -> _Asked:
    """Request the prompt after some seconds in which nothing happens but the streams."""
    if not streams.listeners:
        return _Asked(await asker.answered([message("user", prompt)], output_tokens))
    begun = time.perf_counter()
    await asyncio.sleep(CALM_SECONDS)
    calm = streams.gaps(begun, time.perf_counter())
    asked = await asker.answered([message("user", prompt)], output_tokens)
    gaps = streams.gaps(asked.started, asked.heard[0])
    return _Asked(
        asked,
        statistics.median(gap.lasted for gap in calm),
        max(gap.lasted for gap in gaps),
    )
