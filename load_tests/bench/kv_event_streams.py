"""What publishing KV events costs streams: the time between two tokens of eight streams, and the
processor time of a token.

    python -m load_tests.bench.kv_event_streams

Two daemons of the embedded model take turns, of which one publishes events to a subscriber. In a
third kind of turn more subscribers come to the one that publishes, one after another, so that it
states all its blocks again and again. Figures are medians over rounds of a turn's own relative to
that of the silent daemon in the same round.
"""

import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from threading import Event, Thread

import httpx
import psutil
import typer
import zmq

from load_tests.fleet import BLOCK_SIZE, MODEL
from load_tests.processes import free_port, running

STREAMS, TOKENS = 8, 200
CACHED_BLOCKS = 1000
CACHE = "256MiB"


@dataclass(frozen=True, slots=True)
class Target:
    """A daemon, and the address at which it publishes events, if it does."""

    url: str
    pid: int
    events: str = ""

    def cpu_seconds(self) -> float:
        """Of the daemon and its engine, since they were started."""
        process = psutil.Process(self.pid)
        times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
        return sum(each.user + each.system for each in times)


@dataclass(frozen=True, slots=True)
class Turn:
    """The median time between two tokens, and the processor time of a token, in milliseconds."""

    gap_ms: float
    cpu_ms: float


@contextmanager
def daemon(log: Path, events: str) -> Iterator[Target]:
    """A daemon of the embedded model, without drafts. It publishes at `events`, unless that is "".

    Raises TargetError where it does not start.
    """
    port = free_port()
    command = [sys.executable, "-m", "rootstock_serve", "serve", "--model", MODEL]
    command += ["--port", str(port), "--kv-cache-bytes", CACHE, "--speculate", "off"]
    command += ["--log-level", "warning"]
    if events:
        command += ["--kv-events", events, "--kv-events-replay", f"tcp://127.0.0.1:{free_port()}"]
    url = f"http://127.0.0.1:{port}"
    with running(command, f"{url}/health", log) as process:
        yield Target(url, process.pid, events)


def fill(target: Target) -> None:
    """Have CACHED_BLOCKS blocks cached."""
    n_tokens = 64 * BLOCK_SIZE
    with httpx.Client(base_url=target.url, timeout=300) as http:
        for number in range(CACHED_BLOCKS * BLOCK_SIZE // n_tokens):
            prompt = [number % 250 + 1, number // 250 + 1, *(n % 251 + 1 for n in range(n_tokens))]
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
            http.post("/v1/completions", json=body).raise_for_status()


def turn(target: Target, seed: int) -> Turn:
    """Eight streams at once."""
    before = target.cpu_seconds()
    with ThreadPoolExecutor(STREAMS) as threads:
        gaps = [*threads.map(lambda n: _gaps(target.url, [seed, n, 1]), range(STREAMS))]
    cpu_ms = 1e3 * (target.cpu_seconds() - before) / (STREAMS * TOKENS)
    return Turn(1e3 * statistics.median(gap for each in gaps for gap in each), cpu_ms)


def _gaps(url: str, start: Sequence[int]) -> list[float]:
    """The times between the tokens of a stream."""
    body = {"model": MODEL, "prompt": [each % 250 + 1 for each in start], "max_tokens": TOKENS}
    body |= {"stream": True, "temperature": 0, "ignore_eos": True}
    times = list[float]()
    with (
        httpx.Client(base_url=url, timeout=300) as http,
        http.stream("POST", "/v1/completions", json=body) as answer,
    ):
        answer.raise_for_status()
        times = [time.perf_counter() for line in answer.iter_lines() if line.startswith("data: {")]
    return [later - earlier for earlier, later in pairwise(times)]


@contextmanager
def subscribers(events: str, stay_seconds: float) -> Iterator[list[int]]:
    """Subscribers that come one after another and read everything. The list grows by the number of
    batches that each has received.
    """
    received, ended = list[int](), Event()

    def come_and_go() -> None:
        with zmq.Context() as context:
            while not ended.is_set():
                with context.socket(zmq.SUB) as subscriber:
                    subscriber.subscribe("")
                    subscriber.connect(events)
                    end, n_batches = time.monotonic() + stay_seconds, 0
                    while time.monotonic() < end and not ended.is_set():
                        if subscriber.poll(100):
                            subscriber.recv_multipart()
                            n_batches += 1
                    received.append(n_batches)

    thread = Thread(target=come_and_go)
    thread.start()
    try:
        yield received
    finally:
        ended.set()
        thread.join()


def main(rounds: int = 9) -> None:
    """Measure, and print a table."""
    kinds = "silent", "publishing", "publishing again"
    turns: dict[str, list[Turn]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        logs = Path(folder)
        silent = stack.enter_context(daemon(logs / "silent.log", ""))
        events = f"tcp://127.0.0.1:{free_port()}"
        publishing = stack.enter_context(daemon(logs / "publishing.log", events))
        for each in (silent, publishing):
            fill(each)
            turn(each, 0)
        stack.enter_context(subscribers(events, math.inf))
        n_batches = 0
        for number in range(1, rounds + 1):
            for kind in kinds if number % 2 else reversed(kinds):
                if kind == "publishing again":
                    with subscribers(events, 1.0) as received:
                        turns[kind].append(turn(publishing, number))
                    n_batches += sum(received)
                else:
                    turns[kind].append(turn(silent if kind == "silent" else publishing, number))
    print("| | between tokens | processor time of a token |\n| --- | --- | --- |")
    for kind, own in turns.items():
        cells = []
        for name in ("gap_ms", "cpu_ms"):
            pairs = zip(own, turns["silent"], strict=True)
            ratio = statistics.median(getattr(a, name) / getattr(b, name) for a, b in pairs)
            figure = statistics.median(getattr(each, name) for each in own)
            cells.append(f"{figure:.2f} ms, {ratio:.3f}")
        print(f"| {kind} | {' | '.join(cells)} |")
    print(f"\n{n_batches} batches were received by subscribers that came while streams ran")


if __name__ == "__main__":
    typer.run(main)
