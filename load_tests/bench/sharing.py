"""How much memory sharing saves under load, and what tails of blocks add to it.

    python -m load_tests.bench.sharing --target http://127.0.0.1:8000

Plays the scenarios `shared` and `burst`, and one request for 16 answers, each on an empty cache,
and asks the daemon again and again how many blocks are held and how many copies would take: shown
is the moment when those would be most. Then prompts are sent twice whose ends lie before, at and
behind the edge of a block, and in between one that is like them in whole blocks alone: a daemon
that shared no part of a block would find that much. The scenarios' prompts fit the checkpoints of
load_tests/checkpoint.py.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import count
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console

from load_tests.client import Target, discover
from load_tests.report import Table
from load_tests.scenarios.kinds import Load, load_scenario
from load_tests.scenarios.load import play
from load_tests.scenarios.workloads import build

SCENARIOS = ("shared", "burst")
OUTPUTS = 16
PERIOD_SECONDS = 0.02
LIMIT_SECONDS = 600.0
PROMPT_BLOCKS = 16


@dataclass(frozen=True, slots=True)
class Peak:
    """The moment at which copies for each sequence would take most blocks."""

    held: int = 0
    copies: int = 0
    saved_bytes: int = 0

    @property
    def row(self) -> tuple[str, ...]:
        ratio = self.copies / max(self.held, 1)
        saved = f"{self.saved_bytes / 2**20:,.1f} MiB"
        return f"{self.held:,}", f"{self.copies:,}", f"{ratio:.1f}", saved


class Daemon:
    """A Rootstock that runs."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self._numbers = count(time.time_ns())

    async def stats(self) -> dict[str, Any]:
        answer = await self._http.get("/admin/cache/stats")
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found

    async def clear(self) -> None:
        (await self._http.post("/admin/cache/clear")).raise_for_status()

    async def ask(self, prompt: list[int], n: int, tokens: int) -> tuple[int, float]:
        """Tokens of the prompt that were cached, and seconds to the end of the answers."""
        body = {"prompt": prompt, "n": n, "max_tokens": tokens, "ignore_eos": True}
        began = time.perf_counter()
        answer = await self._http.post("/v1/completions", json=body)
        answer.raise_for_status()
        details = answer.json()["usage"]["prompt_tokens_details"]
        return int(details["cached_tokens"]), time.perf_counter() - began

    def prompt(self, n_tokens: int) -> list[int]:
        """Unlike all others from its first tokens on."""
        number = next(self._numbers)
        head = [3 + (number >> 4 * digit) % 16 for digit in range(12)]
        return [*head, *(20 + i % 7 for i in range(n_tokens - len(head)))]

    async def peak(self, work: Awaitable[object]) -> Peak:
        """Of the time that the work takes, from an empty cache on."""
        await self.clear()
        async with self._watched() as peaks:
            await work
        return max(peaks, key=lambda peak: peak.copies, default=Peak())

    @asynccontextmanager
    async def _watched(self) -> AsyncIterator[list[Peak]]:
        peaks = list[Peak]()

        async def watch() -> None:
            while True:
                seen = await self.stats()
                held, saved = seen["blocks_held"], seen["blocks_saved"]
                peaks.append(Peak(held, held + saved, seen["saved_bytes"]))
                await asyncio.sleep(PERIOD_SECONDS)

        watcher = asyncio.create_task(watch())
        try:
            yield peaks
        finally:
            watcher.cancel()
            with suppress(asyncio.CancelledError):
                await watcher


async def peaks(daemon: Daemon, target: Target) -> Table:
    rows = list[tuple[str, ...]]()
    for name in SCENARIOS:
        scenario = load_scenario(name)
        assert isinstance(scenario, Load), f"{name} is no load"
        rows.append((name, *(await daemon.peak(play(build(scenario, 0), target))).row))
    forked = daemon.ask(daemon.prompt(1000), OUTPUTS, 32)
    rows.append((f"n={OUTPUTS}", *(await daemon.peak(forked)).row))
    return Table(("load", "blocks held", "with copies", "ratio", "saved"), tuple(rows))


async def tails(daemon: Daemon) -> Table:
    """Whole blocks alone are what a prompt finds that parts from the cached one at their end."""
    block = int((await daemon.stats())["block_size"])
    rows = list[tuple[str, ...]]()
    for beyond in (-1, 0, 1, block // 2):
        n_tokens = PROMPT_BLOCKS * block + beyond
        prompt = daemon.prompt(n_tokens)
        whole = (n_tokens - 1) // block * block
        _, cold = await daemon.ask(prompt, 1, 1)
        parted = [*prompt[:whole], *(16 + i % 3 for i in range(n_tokens - whole))]
        without, parted_seconds = await daemon.ask(parted, 1, 1)
        cached, warm = await daemon.ask(prompt, 1, 1)
        times = (f"{1000 * seconds:.0f}" for seconds in (cold, parted_seconds, warm))
        rows.append((f"{beyond:+}", f"{n_tokens:,}", f"{without:,}", f"{cached:,}", *times))
    columns = ("end", "prompt", "whole blocks", "with tails", "ms cold", "ms whole", "ms tails")
    return Table(columns, tuple(rows))


async def measure(url: str) -> tuple[Table, Table]:
    target = await discover(f"{url}/v1")
    async with httpx.AsyncClient(base_url=url, timeout=LIMIT_SECONDS, trust_env=False) as http:
        daemon = Daemon(http)
        return await peaks(daemon, target), await tails(daemon)


def main(target: Annotated[str, typer.Option(help="The daemon, without /v1.")]) -> None:
    """Load a daemon, and ask it what sharing saves."""
    console = Console(width=100)
    for table in asyncio.run(measure(target)):
        console.print(table.rich())


if __name__ == "__main__":
    typer.run(main)
