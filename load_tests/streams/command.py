"""`python -m load_tests streams`: what it costs the daemon to send many streams at once."""

import asyncio
import math
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from pydantic import TypeAdapter

from load_tests.client import TargetError
from load_tests.conditions import Conditions, observe
from load_tests.processes import Process, cpu_seconds, free_port, running
from load_tests.report import Percentiles, Table, percentiles
from load_tests.streams.listening import Heard, listen
from load_tests.terminal import fail, show

LOG = Path("build/load_tests/streams.log")
BEGIN_SECONDS = 20.0  # for all streams to begin
SETTLE_SECONDS = 2.0  # after that, before the measurement
LEAD_SECONDS = BEGIN_SECONDS + SETTLE_SECONDS
ROW_TOKENS = 700  # that the paced daemon has room for, by stream
WORD = "the"  # what every token of the paced runner says
LEAST_PACE = 0.95  # of the tokens asked for; below it the daemon has fallen behind


@dataclass(frozen=True, slots=True)
class Streaming:
    """What the daemon's process did while the streams were read."""

    streams: int
    asked_tokens_per_second: float  # of each stream
    least_tokens_per_second: float  # of the slowest stream
    tokens_per_second: float  # of all streams together
    cpu_seconds_per_second: float  # of all the process's threads
    gap_seconds: Percentiles  # between reads, in a client that shares the machine

    @property
    def cpu_microseconds_per_token(self) -> float:
        """Of the daemon's process, for each token that a client got."""
        return 1e6 * self.cpu_seconds_per_second / self.tokens_per_second

    @property
    def keeps_pace(self) -> bool:
        """Whether every stream got what was asked for."""
        return self.least_tokens_per_second >= LEAST_PACE * self.asked_tokens_per_second


@dataclass(frozen=True, slots=True)
class Measurement:
    """The JSON of `streams`."""

    conditions: Conditions
    runs: tuple[Streaming, ...]


def streams(
    *,
    count: Annotated[int, typer.Option("--streams", min=1, help="How many at once.")] = 256,
    tokens_per_second: Annotated[float, typer.Option(help="Of each stream.")] = 20.0,
    seconds: Annotated[float, typer.Option(help="How long they are measured.")] = 10.0,
    repeat: Annotated[int, typer.Option(min=1, help="Runs, each on a fresh process.")] = 3,
    json: Annotated[Path | None, typer.Option("--json", help="Where to write it all.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
) -> None:
    """Read many streams from one daemon whose tokens cost nothing, and count its CPU time."""
    conditions = observe(0, ("python -m load_tests.streams.paced",), blas="none is used")
    try:
        runs = tuple(measure(count, tokens_per_second, seconds) for _ in range(repeat))
    except TargetError as error:
        raise typer.Exit(fail(str(error))) from error
    show(conditions, markdown, table(runs))
    if json:
        found = Measurement(conditions, runs)
        json.write_bytes(TypeAdapter(Measurement).dump_json(found, indent=2))
    if not all(run.keeps_pace for run in runs):
        raise typer.Exit(fail("the daemon fell behind: its CPU time is of fewer tokens"))


def table(runs: tuple[Streaming, ...]) -> Table:
    """A row for each run."""
    columns = ("streams", "tokens/s asked", "slowest got", "all", "CPU s/s", "us a token", "gap ms")
    rows = (
        (
            str(run.streams),
            f"{run.asked_tokens_per_second:g}",
            f"{run.least_tokens_per_second:.1f}",
            f"{run.tokens_per_second:.0f}",
            f"{run.cpu_seconds_per_second:.2f}",
            f"{run.cpu_microseconds_per_token:.0f}",
            f"{1e3 * run.gap_seconds.p50:.0f} / {1e3 * run.gap_seconds.p95:.0f}",
        )
        for run in runs
    )
    return Table(columns, tuple(rows))


def measure(
    count: int, tokens_per_second: float, seconds: float, directory: Path | None = None
) -> Streaming:
    """Read the streams of a fresh daemon, which is that of the checkout in `directory`, or of this
    one.

    Raises TargetError where the daemon does not start or a stream breaks off.
    """
    port, max_tokens = free_port(), int(tokens_per_second * (LEAD_SECONDS + seconds))
    rows = count * math.ceil(max_tokens / ROW_TOKENS)
    module = "load_tests.streams.paced"
    command = (sys.executable, "-m", module, str(port), str(rows), str(tokens_per_second), WORD)
    url = f"http://127.0.0.1:{port}/health"
    with running(command, url, LOG, directory=directory) as process:
        return asyncio.run(_read(process, port, count, tokens_per_second, seconds, max_tokens))


async def _read(
    process: Process,
    port: int,
    count: int,
    tokens_per_second: float,
    seconds: float,
    max_tokens: int,
) -> Streaming:
    heard = [Heard() for _ in range(count)]
    readers = [
        asyncio.create_task(listen(port, _body(number, max_tokens), WORD, one))
        for number, one in enumerate(heard)
    ]
    try:
        await _all_begun(heard, readers)
        await asyncio.sleep(SETTLE_SECONDS)
        since, cpu_before = time.perf_counter(), cpu_seconds(process)
        await asyncio.sleep(seconds)
        until, cpu_after = time.perf_counter(), cpu_seconds(process)
    finally:
        for reader in readers:
            reader.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*readers, return_exceptions=True)
    words = [one.words(since, until) for one in heard]
    return Streaming(
        streams=count,
        asked_tokens_per_second=tokens_per_second,
        least_tokens_per_second=min(words) / (until - since),
        tokens_per_second=sum(words) / (until - since),
        cpu_seconds_per_second=(cpu_after - cpu_before) / (until - since),
        gap_seconds=percentiles(gap for one in heard for gap in one.gap_seconds(since, until)),
    )


def _body(number: int, max_tokens: int) -> dict[str, object]:
    return {
        "model": "rootstock-demo",
        "messages": [{"role": "user", "content": f"Stream number {number}"}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
    }


async def _all_begun(heard: list[Heard], readers: list["asyncio.Task[None]"]) -> None:
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
