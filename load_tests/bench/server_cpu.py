"""Processor time of the server's process for each token that it streams, in microseconds.

    python -m load_tests.bench.server_cpu [--against DIRECTORY] [--rounds N] [--json PATH]

The engine is a process of its own that computes nothing: it gives every stream a token at a fixed
rate (`load_tests.streams.paced`). Only the server's process is counted, all its threads. Cases: 1,
32 and 256 streams of chat completions.

With `--against` the server of another checkout runs in turn, each round in a new process: compare
two commits by the ratio of their medians.
"""

import asyncio
import logging
import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from load_tests.client import TargetError
from load_tests.processes import Process
from load_tests.report import Table
from load_tests.streams.listening import Heard, Span, background, listen, measured, paced_daemon
from load_tests.terminal import fail, show_figures

TOKENS_PER_SECOND = {1: 50.0, 32: 20.0, 256: 4.0}
"""Of each stream, by the number of streams: low enough that no two tokens of a stream come at once,
which would make each cheaper, also on two cores that others use.
"""
LEAST_PACE = 0.95
"""Share of its tokens that each stream should get; below it the server has fallen behind."""

logger = logging.getLogger(__name__)

HERE = Path(__file__).parents[2]
LOG = Path("build/load_tests/streams.log")
BEGIN_SECONDS = 20.0  # for all streams to begin
SETTLE_SECONDS = 2.0  # after that, before the measurement
LEAD_SECONDS = BEGIN_SECONDS + SETTLE_SECONDS
ROW_TOKENS = 700  # that the paced daemon has room for, by stream


def main(
    against: Annotated[Path | None, typer.Option(help="Another checkout, to compare with.")] = None,
    rounds: int = 3,
    seconds: Annotated[float, typer.Option(help="How long each case is measured.")] = 10.0,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Measure and print a table."""
    checkouts = {"here": HERE} | ({"there": against.resolve()} if against else {})
    found: dict[str, dict[int, list[float]]] = {
        name: {count: [] for count in TOKENS_PER_SECOND} for name in checkouts
    }
    for number in range(rounds):
        for count, rate in TOKENS_PER_SECOND.items():
            for name in sorted(checkouts, reverse=bool(number % 2)):
                try:
                    found[name][count].append(measure(count, rate, seconds, checkouts[name]))
                except TargetError as error:
                    raise typer.Exit(fail(str(error))) from error
    rows = tuple(
        (str(count), *(_figures(found[name][count]) for name in checkouts), _ratio(found, count))
        for count in TOKENS_PER_SECOND
    )
    columns = ("streams", *(f"us a token {name}" for name in checkouts), "ratio of medians")
    show_figures(Table(columns, rows), [found], json_path)


def measure(count: int, tokens_per_second: float, seconds: float, directory: Path) -> float:
    """Microseconds a token of a fresh server that runs the checkout in `directory`.

    Raises TargetError if it does not start or a stream breaks off.
    """
    max_tokens = int(tokens_per_second * (LEAD_SECONDS + seconds))
    rows = count * math.ceil(max_tokens / ROW_TOKENS)
    with paced_daemon(rows, tokens_per_second, LOG, directory) as (process, port):
        heard = [Heard() for _ in range(count)]
        span = asyncio.run(_read(process, port, heard, max_tokens, seconds))
    words = [one.words(span.since, span.until) for one in heard]
    return microseconds_per_token(words, span, tokens_per_second)


def microseconds_per_token(words: Sequence[int], span: Span, tokens_per_second: float) -> float:
    """Processor time for each word that the streams got in the time. Warns if a stream got less
    than it should: the machine was busy, and tokens that come together are cheaper.
    """
    slowest = min(words) / span.seconds
    if slowest < LEAST_PACE * tokens_per_second:
        logger.warning("The server fell behind: a stream got %.1f tokens/s.", slowest)
    return 1e6 * span.cpu_seconds / sum(words)


async def _read(
    process: Process, port: int, heard: Sequence[Heard], max_tokens: int, seconds: float
) -> Span:
    streams = [
        listen(port, f"Stream number {number}", max_tokens, one) for number, one in enumerate(heard)
    ]
    async with background(streams) as readers:
        await _all_begun(heard, readers)
        await asyncio.sleep(SETTLE_SECONDS)
        return await measured(process, seconds)


async def _all_begun(heard: Sequence[Heard], readers: Sequence["asyncio.Task[None]"]) -> None:
    """Raises TargetError when a stream ends before, or does not begin."""
    deadline = time.perf_counter() + BEGIN_SECONDS
    while not all(one.reads for one in heard):
        for reader in readers:
            if reader.done():
                reader.result()
                raise TargetError("a stream ended before all had begun")
        if time.perf_counter() > deadline:
            raise TargetError(f"not all streams had begun after {BEGIN_SECONDS:.0f} s")
        await asyncio.sleep(0.05)


def _figures(runs: list[float]) -> str:
    return f"{statistics.median(runs):.0f} ({min(runs):.0f} to {max(runs):.0f})"


def _ratio(found: dict[str, dict[int, list[float]]], count: int) -> str:
    if "there" not in found:
        return ""
    here, there = (statistics.median(found[name][count]) for name in ("here", "there"))
    return f"{here / there:.2f}"


if __name__ == "__main__":
    typer.run(main)
