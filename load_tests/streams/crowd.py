"""`python -m load_tests crowd`: what others notice of thousands of connections that read slowly.

The daemon computes 32 rows at a fixed pace, so what grows is what the server does. Half of the
crowd asks for answers and reads them at a trickle, the other half holds its connection open and
asks for `/health` now and then. Their addresses are others of the loopback, which Linux has
without configuration and macOS has not.
"""

import asyncio
import random
import socket
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from pydantic import TypeAdapter

from load_tests.client import TargetError
from load_tests.conditions import Conditions, observe
from load_tests.processes import Process
from load_tests.report import Percentiles, Table, percentiles
from load_tests.streams.listening import (
    Heard,
    background,
    chat_request,
    listen,
    measured,
    paced_daemon,
)
from load_tests.terminal import fail, show

LOG = Path("build/load_tests/crowd.log")
ROWS = 32  # as many as a daemon computes together by default
TOKENS_PER_SECOND = 20.0
ANSWER_TOKENS = 200
PROBES = 4
CROWD_ADDRESSES = 16
SLOW_READ_BYTES = 256  # a second
RECEIVE_BUFFER_BYTES = 4096  # of the kernel: more would hide that nobody reads
HEALTH_SECONDS = 20.0  # between two requests of a quiet connection
RETRY_SECONDS = 2.0  # after a refusal
SETTLE_SECONDS = 10.0
FREE_SECONDS = 10.0  # after the crowd has left, within which its memory is to be free
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Phase:
    """What the probes and the daemon's process saw for some time."""

    name: str
    connections: int
    gap_seconds: Percentiles  # between a probe's reads
    cpu_seconds_per_second: float
    resident_bytes: int  # at its end


@dataclass(frozen=True, slots=True)
class Measurement:
    """The JSON of `crowd`."""

    conditions: Conditions
    phases: tuple[Phase, ...]


def crowd(
    *,
    connections: Annotated[int, typer.Option(min=2, help="Of the crowd.")] = 2000,
    seconds: Annotated[float, typer.Option(help="How long it stays.")] = 300.0,
    alone_seconds: Annotated[float, typer.Option(help="Probes alone, before.")] = 60.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Where to write it all.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
) -> None:
    """Read a few streams without and with thousands of connections, half of them slow readers."""
    conditions = observe(0, ("python -m load_tests.streams.paced",), blas="none is used")
    try:
        with paced_daemon(ROWS, TOKENS_PER_SECOND, LOG) as (process, port):
            phases = asyncio.run(_phases(process, port, connections, seconds, alone_seconds))
    except TargetError as error:
        raise typer.Exit(fail(str(error))) from error
    show(conditions, markdown, table(phases))
    if json_file:
        found = Measurement(conditions, phases)
        json_file.write_bytes(TypeAdapter(Measurement).dump_json(found, indent=2))


def table(phases: Sequence[Phase]) -> Table:
    """A row for each phase."""
    columns = ("phase", "connections", "gap ms", "95%", "longest", "CPU s/s", "resident MiB")
    rows = (
        (
            phase.name,
            str(phase.connections),
            *(
                f"{1e3 * gap:.1f}"
                for gap in (phase.gap_seconds.p50, phase.gap_seconds.p95, phase.gap_seconds.max)
            ),
            f"{phase.cpu_seconds_per_second:.2f}",
            f"{phase.resident_bytes / MIB:.0f}",
        )
        for phase in phases
    )
    return Table(columns, tuple(rows))


async def _phases(
    process: Process, port: int, connections: int, seconds: float, alone_seconds: float
) -> tuple[Phase, ...]:
    probes = [[Heard()] for _ in range(PROBES)]
    async with background([_probe(port, number, heard) for number, heard in enumerate(probes)]):
        await asyncio.sleep(SETTLE_SECONDS)
        alone = await _phase("alone", 0, process, probes, alone_seconds)
        slow = [_slow_reader(port, number) for number in range(connections // 2)]
        quiet = [_quiet(port, number) for number in range(connections - connections // 2)]
        async with background([*slow, *quiet]):
            await asyncio.sleep(SETTLE_SECONDS)
            beside = await _phase("beside the crowd", connections, process, probes, seconds)
        after = await _phase("after it", 0, process, probes, FREE_SECONDS)
    return alone, beside, after


async def _phase(
    name: str, connections: int, process: Process, probes: list[list[Heard]], seconds: float
) -> Phase:
    span = await measured(process, seconds)
    answers = (one for heard in probes for one in heard)
    gaps = (gap for one in answers for gap in one.gap_seconds(span.since, span.until))
    return Phase(
        name,
        connections,
        percentiles(gaps),
        span.cpu_seconds / span.seconds,
        psutil.Process(process.pid).memory_info().rss,
    )


async def _probe(port: int, number: int, heard: list[Heard]) -> None:
    """Read one answer after another, each noted in a Heard of its own."""
    while True:
        await listen(port, f"Probe {number}", ANSWER_TOKENS, heard[-1])
        heard.append(Heard())


async def _slow_reader(port: int, number: int) -> None:
    """Ask for one answer after another, and read a few bytes of it every second."""
    await _again_and_again(port, number, _read_slowly)


async def _quiet(port: int, number: int) -> None:
    """Ask for `/health` now and then on one connection."""
    await _again_and_again(port, number, _ask_for_health)


Use = Callable[[socket.socket, int], Coroutine[Any, Any, None]]


async def _again_and_again(port: int, number: int, use: Use) -> None:
    """Connect from one of the crowd's addresses and use the connection; begin anew when it ends."""
    loop = asyncio.get_running_loop()
    await asyncio.sleep(random.uniform(0, SETTLE_SECONDS / 2))
    while True:
        with socket.socket() as connection, suppress(OSError):
            connection.setblocking(False)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
            connection.bind((f"127.0.1.{1 + number % CROWD_ADDRESSES}", 0))
            await loop.sock_connect(connection, ("127.0.0.1", port))
            await use(connection, number)
        await asyncio.sleep(RETRY_SECONDS)


async def _read_slowly(connection: socket.socket, number: int) -> None:
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(connection, chat_request(f"Slow reader {number}", ANSWER_TOKENS))
    while True:
        if not await loop.sock_recv(connection, SLOW_READ_BYTES):
            return
        await asyncio.sleep(1)


async def _ask_for_health(connection: socket.socket, number: int) -> None:
    loop = asyncio.get_running_loop()
    while True:
        await loop.sock_sendall(connection, b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        if not await loop.sock_recv(connection, RECEIVE_BUFFER_BYTES):
            return
        await asyncio.sleep(HEALTH_SECONDS)
