"""How much throughput a daemon loses while somebody watches its cache.

    python -m load_tests.bench.watched --target http://127.0.0.1:8000 [--streams 8] [--rounds 10]

Each round requests `--streams` answers at once, with nobody watching and with one reader of
`/admin/cache/tree/stream`; which comes first alternates. Prompts share no first token, so that
all rounds cost the same. Each row has the ratio of its round, the last row their median.
"""

import asyncio
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import count
from typing import Annotated

import httpx
import typer
from rich.console import Console

from load_tests.report import Table

WORDS = ("one two three four five six seven eight nine ten " * 20).split()
LIMIT_SECONDS = 900.0


class Bursts:
    """Requests `streams` answers at once of one daemon."""

    def __init__(self, http: httpx.AsyncClient, streams: int, tokens: int) -> None:
        self._http = http
        self._streams = streams
        self._tokens = tokens
        self._numbers = count(time.time_ns())

    async def tokens_per_second(self) -> float:
        began = time.perf_counter()
        tokens = await asyncio.gather(*(self._ask() for _ in range(self._streams)))
        return sum(tokens) / (time.perf_counter() - began)

    async def _ask(self) -> int:
        body = {
            "prompt": " ".join((str(next(self._numbers)), *WORDS)),
            "max_tokens": self._tokens,
            "ignore_eos": True,
            "temperature": 0,
        }
        answer = await self._http.post("/v1/completions", json=body)
        answer.raise_for_status()
        return int(answer.json()["usage"]["completion_tokens"])


@asynccontextmanager
async def watching(http: httpx.AsyncClient, pictures: list[int]) -> AsyncIterator[None]:
    """Read the stream, and record the size in bytes of each picture."""

    async def read() -> None:
        async with http.stream("GET", "/admin/cache/tree/stream") as answer:
            answer.raise_for_status()
            lines = (line async for line in answer.aiter_lines() if line.startswith("data: "))
            async for line in lines:
                pictures.append(len(line))  # noqa: PERF401 - for as long as the stream lasts

    reader = asyncio.create_task(read())
    try:
        yield
    finally:
        reader.cancel()
        with suppress(asyncio.CancelledError):
            await reader


async def measure(target: str, streams: int, tokens: int, rounds: int) -> Table:
    rows, ratios = list[tuple[str, ...]](), list[float]()
    async with httpx.AsyncClient(base_url=target, timeout=LIMIT_SECONDS, trust_env=False) as http:
        bursts = Bursts(http, streams, tokens)
        await bursts.tokens_per_second()  # warm up
        for number in range(rounds):
            pictures, rates = list[int](), dict[bool, float]()
            for is_watched in (False, True) if number % 2 else (True, False):
                if is_watched:
                    async with watching(http, pictures):
                        rates[True] = await bursts.tokens_per_second()
                else:
                    rates[False] = await bursts.tokens_per_second()
            ratios.append(rates[True] / rates[False])
            mean_bytes = statistics.mean(pictures) if pictures else 0
            rows.append(
                (
                    *(f"{rates[False]:.1f}", f"{rates[True]:.1f}", f"{ratios[-1]:.3f}"),
                    f"{len(pictures)} of {mean_bytes:,.0f} bytes",
                )
            )
    rows.append(("", "median", f"{statistics.median(ratios):.3f}", ""))
    return Table(("tokens/s alone", "watched", "ratio", "pictures"), tuple(rows))


def main(
    target: Annotated[str, typer.Option(help="The daemon, without /v1.")],
    streams: Annotated[int, typer.Option(min=1, help="Answers at once.")] = 8,
    tokens: Annotated[int, typer.Option(min=1, help="Of each answer.")] = 200,
    rounds: Annotated[int, typer.Option(min=1)] = 10,
) -> None:
    """Compare the throughput of a daemon with and without a watcher."""
    Console(width=100).print(asyncio.run(measure(target, streams, tokens, rounds)).rich())


if __name__ == "__main__":
    typer.run(main)
