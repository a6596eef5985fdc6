"""A client that harms nobody, and how long it waits: tiny chats, a held one, a stream, /health."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx

from tests.hostile.cases import CHAT, MESSAGES

PAUSE_SECONDS = 0.02
HELD = {"messages": MESSAGES, "max_tokens": 4, "response_format": {"type": "json_object"}}
FREE = {"messages": MESSAGES, "max_tokens": 1}
STREAM = {"messages": MESSAGES, "max_tokens": 400, "stream": True}  # each token has a text


@dataclass(slots=True)
class Waits:
    """Seconds: of chats, of those that a grammar holds, between two pieces of a stream, and of
    /health.
    """

    free: list[float] = field(default_factory=list)
    held: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    health: list[float] = field(default_factory=list)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    @property
    def kinds(self) -> dict[str, list[float]]:
        return {"free": self.free, "held": self.held, "gap": self.gaps, "health": self.health}

    async def note(self, waits: list[float], seconds: float) -> None:
        async with self.changed:
            waits.append(seconds)
            self.changed.notify_all()

    def worst(self) -> dict[str, float]:
        """The longest of each kind."""
        return {name: max(waits, default=0.0) for name, waits in self.kinds.items()}

    def begin_anew(self) -> None:
        for waits in self.kinds.values():
            waits.clear()

    async def grow(self) -> None:
        """Until each kind has been answered once more: it began after this was called."""
        kinds = [(waits, len(waits)) for waits in self.kinds.values()]
        async with self.changed:
            await self.changed.wait_for(lambda: all(len(waits) > n + 1 for waits, n in kinds))


@asynccontextmanager
async def probing(http: httpx.AsyncClient) -> AsyncIterator[Waits]:
    """Probe as long as the context lasts. A probe that fails is an exception of the context."""
    waits = Waits()
    async with asyncio.TaskGroup() as tasks:
        probes = [
            tasks.create_task(_again_and_again(lambda: _chat(http, FREE, waits, waits.free))),
            tasks.create_task(_again_and_again(lambda: _chat(http, HELD, waits, waits.held))),
            tasks.create_task(_again_and_again(lambda: _stream(http, waits))),
            tasks.create_task(_again_and_again(lambda: _health(http, waits))),
        ]
        await waits.grow()  # what starts with the first request is nobody's fault
        waits.begin_anew()
        yield waits
        for probe in probes:
            probe.cancel()


async def _again_and_again(probe: Callable[[], Awaitable[None]]) -> None:
    while True:
        await probe()
        await asyncio.sleep(PAUSE_SECONDS)


async def _chat(
    http: httpx.AsyncClient, body: dict[str, object], waits: Waits, kind: list[float]
) -> None:
    began = time.perf_counter()
    answer = await http.post(CHAT, json=body)
    assert answer.status_code == httpx.codes.OK, answer.text
    await waits.note(kind, time.perf_counter() - began)


async def _health(http: httpx.AsyncClient, waits: Waits) -> None:
    began = time.perf_counter()
    (await http.get("/health")).raise_for_status()
    await waits.note(waits.health, time.perf_counter() - began)


async def _stream(http: httpx.AsyncClient, waits: Waits) -> None:
    async with http.stream("POST", CHAT, json=STREAM) as response:
        last = time.perf_counter()
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                assert '"error"' not in line, line
                now = time.perf_counter()
                await waits.note(waits.gaps, now - last)
                last = now
