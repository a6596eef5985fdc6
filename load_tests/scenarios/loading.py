"""A prefix comes from disk, and another goes there, beside streams: what it costs them."""

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import httpx

from load_tests.client import Asker, Listener, Target, TargetError, connected, limited, message
from load_tests.scenarios.arrival import STREAM_TOKENS, UNDER_WAY, Gap, gaps_until
from load_tests.scenarios.kinds import Loading
from load_tests.scenarios.workloads import text

CALM_SECONDS = 4.0  # in which nothing happens but the streams
WRITE_SECONDS = 60.0  # within which a prompt must be on disk
SETTLED_SECONDS = 1.5  # after which nothing more is written
POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Phase:
    """What the streams did in a while. Seconds; gaps as they ended since its beginning."""

    lasted: float
    moved_bytes: int
    median_gap: float
    worst_gap: float
    gaps: tuple[Gap, ...]


@dataclass(frozen=True, slots=True)
class Loaded:
    """The streams alone, beside a hit in memory, beside a load, beside the step that computes what
    was not loaded, and beside what writes a prompt.
    """

    prompt_tokens: int
    cached_tokens: int
    cold_seconds: float  # to the first token, with nobody else there
    loaded_seconds: float  # the same from disk, beside the streams
    calm: Phase
    hit: Phase  # the same prompt from memory: it has a last step of computing, too
    loading: Phase
    resuming: Phase  # until the first token: those behind the last one that was loaded
    writing: Phase

    @property
    def headline(self) -> str:
        """For a line of progress."""
        phases = {
            "alone": self.calm,
            "hit": self.hit,
            "loading": self.loading,
            "resuming": self.resuming,
            "writing": self.writing,
        }
        told = (
            f"{name} {1e3 * phase.median_gap:.0f} / {1e3 * phase.worst_gap:.0f}"
            for name, phase in phases.items()
        )
        return f"gaps, median / worst ms: {', '.join(told)}"


async def play_loading(scenario: Loading, seed: int, target: Target) -> Loaded:
    """Raises TargetError."""
    rng = random.Random(seed)
    prompts = [text(rng, scenario.prompt_words) for _ in range(2)]
    stream_texts = [text(rng, scenario.stream_words) for _ in range(scenario.streams)]
    async with limited(target), connected(target) as asker:
        disk = _Disk(asker)
        play = _Play(asker, disk, scenario.output_tokens)
        cold = await play.ask(prompts[0])
        await disk.settled()
        await disk.clear_memory()
        streams = [Listener() for _ in stream_texts]
        running = [
            asyncio.create_task(asker.ask([message("user", words)], STREAM_TOKENS, listener))
            for words, listener in zip(stream_texts, streams, strict=True)
        ]
        try:
            await _under_way(running, streams)
            return await play.beside(streams, prompts, cold)
        finally:
            for one in running:
                one.cancel()
            await asyncio.gather(*running, return_exceptions=True)


async def _under_way(running: Sequence["asyncio.Task[None]"], streams: Sequence[Listener]) -> None:
    """Each has said something. Raises TargetError if one has ended."""
    while any(len(one.heard) < UNDER_WAY for one in streams):
        for task in running:
            if task.done():
                task.result()
        await asyncio.sleep(0.01)


@dataclass(frozen=True, slots=True)
class _Disk:
    """What the daemon says of its disk cache."""

    asker: Asker

    async def figures(self) -> dict[str, Any]:
        found = (await self._admin("GET", "stats"))["disk"]
        if found is None:
            raise TargetError("the server has no disk cache")
        return dict(found)

    async def clear_memory(self) -> None:
        await self._admin("POST", "clear?tiers=memory")

    async def settled(self) -> float:
        """Something has been written, and nothing more for a while; when it ended."""
        begun, deadline = await self._written(), time.perf_counter() + WRITE_SECONDS
        last, moment = begun, 0.0
        while last == begun or time.perf_counter() - moment < SETTLED_SECONDS:
            await asyncio.sleep(POLL_SECONDS)
            if (now := await self._written()) != last:
                last, moment = now, time.perf_counter()
            if time.perf_counter() > deadline:
                raise TargetError(f"the prompt was not written within {WRITE_SECONDS:.0f} s")
        return moment

    async def _written(self) -> int:
        figures = await self.figures()
        return int(figures["written_bytes"])

    async def _admin(self, method: str, path: str) -> dict[str, Any]:
        url = f"{self.asker.target.base_url.removesuffix('/v1')}/admin/cache/{path}"
        try:
            response = await self.asker.http.request(method, url)
            response.raise_for_status()
            return dict(response.json())
        except (httpx.HTTPError, ValueError) as error:
            raise TargetError(f"{url}: {error!r}") from error


@dataclass(frozen=True, slots=True)
class _Play:
    asker: Asker
    disk: _Disk
    output_tokens: int

    async def ask(self, prompt: str) -> Listener:
        listener = Listener()
        await self.asker.ask([message("user", prompt)], self.output_tokens, listener)
        if not listener.heard:
            raise TargetError("the long prompt was not answered")
        return listener

    async def beside(
        self, streams: Sequence[Listener], prompts: Sequence[str], cold: Listener
    ) -> Loaded:
        """The phases, one after the other."""
        begun = time.perf_counter()
        await asyncio.sleep(CALM_SECONDS)
        calm = _phase(streams, begun, time.perf_counter(), 0)
        before = await self.disk.figures()
        again = await self.ask(prompts[0])
        after = await self.disk.figures()
        n_read = after["read_bytes"] - before["read_bytes"]
        first, last = last_step(streams, again.heard[0])
        loading = _phase(streams, again.started, first, n_read)
        resuming = _phase(streams, last, again.heard[0], 0)
        once_more = await self.ask(prompts[0])
        hit = _phase(streams, once_more.started, once_more.heard[0], 0)
        other = await self.ask(prompts[1])
        ended = await self.disk.settled()
        n_written = (await self.disk.figures())["written_bytes"] - after["written_bytes"]
        writing = _phase(streams, other.done or 0.0, ended, n_written)
        return Loaded(
            prompt_tokens=again.usage["prompt_tokens"],
            cached_tokens=again.usage["prompt_tokens_details"]["cached_tokens"],
            cold_seconds=cold.heard[0] - cold.started,
            loaded_seconds=again.heard[0] - again.started,
            calm=calm,
            hit=hit,
            loading=loading,
            resuming=resuming,
            writing=writing,
        )


def last_step(streams: Sequence[Listener], said: float) -> tuple[float, float]:
    """When the first and the last of the streams heard the tokens of the step before the one in
    which another's token was said: a step's tokens are delivered together. Raises TargetError.
    """
    before = [
        min(pairwise(one.heard), key=lambda gap: abs(gap[1] - said))[0]
        for one in streams
        if len(one.heard) > 1
    ]
    if not before:
        raise TargetError("the streams said nothing")
    return min(before), max(before)


def _phase(streams: Sequence[Listener], begun: float, ended: float, moved_bytes: int) -> Phase:
    gaps = gaps_until(begun, ended, [one.heard for one in streams])
    if not gaps:
        raise TargetError("the streams said nothing")
    lasted = [gap.lasted for gap in gaps]
    return Phase(round(ended - begun, 4), moved_bytes, statistics.median(lasted), max(lasted), gaps)
