"""Several models in one daemon: their processes die, and more of them are asked for than fit.

`python -m tests.restart deaths` and `python -m tests.restart budget`.
"""

import asyncio
import json
import random
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from load_tests.checkpoint import checkpoint
from load_tests.processes import free_port, running

ENGINE = "engine.remote"
"""In the command line of a model's process."""

MIB = 1 << 20
SAMPLE_SECONDS = 0.1
STREAM_TOKENS = 400
EVENTS = 3
"""Events of both streams before a process is killed."""


@dataclass(frozen=True, slots=True)
class Daemon:
    """A running daemon with several models."""

    url: str
    pid: int

    def engines(self) -> list[psutil.Process]:
        """The processes of the models that are loaded or being loaded, the oldest first."""
        found = []
        for child in psutil.Process(self.pid).children():
            with suppress(psutil.NoSuchProcess):
                if ENGINE in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
                    found.append(child)
        return sorted(found, key=lambda child: child.create_time())

    def resident_bytes(self) -> int:
        """The resident memory of all engines' processes and of the processes they started."""
        total = 0
        for engine in self.engines():
            with suppress(psutil.NoSuchProcess):
                family = [engine, *engine.children(recursive=True)]
                total += sum(process.memory_info().rss for process in family)
        return total


@contextmanager
def served(models: Sequence[dict[str, Any]], **settings: Any) -> Iterator[Daemon]:
    """Run a daemon with these entries of the setting `models`, and other settings."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "models.yaml"
        file.write_text(yaml.safe_dump({"models": list(models), "port": port, **settings}))
        command = [sys.executable, "-m", "rootstock_serve", "serve", "--config", str(file)]
        with running(command, f"{url}/health", Path(name) / "daemon.log") as process:
            yield Daemon(url, process.pid)


def deaths(times: int, stops: int) -> list[str]:
    """Kill, or stop, one model's process while it streams and another model streams, `times` times;
    the first `stops` of them by SIGSTOP. Returns what went wrong.

    Each time the first stream must end with an error, the other as if nothing had happened, and the
    next request to the first model must be answered.
    """
    models: list[dict[str, Any]] = [
        {"model": "rootstock-demo", "served_model_name": ["demo"], "pinned": True},
        {"model": str(checkpoint()), "served_model_name": ["first"]},
    ]
    with served(models, memory_budget=4096 * MIB) as daemon:
        return asyncio.run(_deaths(daemon, times, stops))


async def _deaths(daemon: Daemon, times: int, stops: int) -> list[str]:
    problems = list[str]()
    async with httpx.AsyncClient(base_url=daemon.url, timeout=600) as http:
        await _chat(http, "first", "hello", 3)
        for number in range(times):
            kind = signal.SIGSTOP if number < stops else signal.SIGKILL
            found = await _death(http, daemon, number, kind)
            problems += [f"{number}, {kind.name}: {problem}" for problem in found]
    return problems


async def _death(
    http: httpx.AsyncClient, daemon: Daemon, number: int, kind: signal.Signals
) -> list[str]:
    begun = asyncio.Event(), asyncio.Event()
    dying = asyncio.create_task(_stream(http, "first", number, begun[0]))
    living = asyncio.create_task(_stream(http, "demo", number, begun[1]))
    await asyncio.gather(*(one.wait() for one in begun))
    daemon.engines()[-1].send_signal(kind)  # the one that was loaded last
    problems = list[str]()
    if not (ended := await dying).startswith("error"):
        problems.append(f"the stream of the dead model ended with {ended}")
    if (ended := await living) != "length":
        problems.append(f"the other model's stream ended with {ended}")
    answer = await _chat(http, "first", f"again {number}", 3)
    if answer.status_code != httpx.codes.OK:
        problems.append(f"the next request: {answer.status_code} {answer.text[:200]}")
    return problems


async def _stream(http: httpx.AsyncClient, model: str, number: int, begun: asyncio.Event) -> str:
    """Stream an answer; `begun` is set after EVENTS events. Returns how it ended: a finish reason,
    or "error: " and the message.
    """
    body = _body(model, f"tell {number}", STREAM_TOKENS) | {"stream": True, "ignore_eos": True}
    n_events, end = 0, "nothing"
    async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            n_events += 1
            if n_events == EVENTS:
                begun.set()
            if "error" in event:
                end = f"error: {event['error']['message']}"
            elif event["choices"] and event["choices"][0]["finish_reason"]:
                end = event["choices"][0]["finish_reason"]
    return end


@dataclass(frozen=True, slots=True)
class WithinBudget:
    """What three models of which two fit came to."""

    failures: tuple[str, ...]
    most_bytes: int  # that all engines' processes had together, sampled every SAMPLE_SECONDS
    loads: int


def budget(n_requests: int, at_once: int, budget_bytes: int, seed: int) -> WithinBudget:
    """Send requests in random order, `at_once` at a time, for three models of which two fit into
    the memory budget.
    """
    models: list[dict[str, Any]] = [
        {"model": "rootstock-demo", "served_model_name": ["demo"]},
        {"model": str(checkpoint()), "served_model_name": ["first"], "preload": False},
        {
            "model": str(checkpoint(seed=1)),
            "served_model_name": ["embedder"],
            "preload": False,
            "pooling": "last",
        },
    ]
    with served(models, memory_budget=budget_bytes) as daemon:
        return asyncio.run(_budget(daemon, n_requests, at_once, seed))


async def _budget(daemon: Daemon, n_requests: int, at_once: int, seed: int) -> WithinBudget:
    rng, slots = random.Random(seed), asyncio.Semaphore(at_once)
    failures, sampled, pids = list[str](), list[int](), set[int]()

    async def ask(http: httpx.AsyncClient, number: int, model: str) -> None:
        async with slots:
            if model == "embedder":
                body = {"model": model, "input": f"request {number}"}
                answer = await http.post("/v1/embeddings", json=body)
            else:
                answer = await _chat(http, model, f"request {number}", 16)
        if answer.status_code != httpx.codes.OK:
            failures.append(f"{model}: {answer.status_code} {answer.text[:200]}")

    async def sample() -> None:
        while True:
            sampled.append(await asyncio.to_thread(daemon.resident_bytes))
            pids.update(engine.pid for engine in daemon.engines())
            await asyncio.sleep(SAMPLE_SECONDS)

    async with httpx.AsyncClient(base_url=daemon.url, timeout=600) as http:
        sampling = asyncio.create_task(sample())
        names = [rng.choice(("demo", "first", "embedder")) for _ in range(n_requests)]
        await asyncio.gather(*(ask(http, *each) for each in enumerate(names)))
        sampling.cancel()
    return WithinBudget(tuple(failures), max(sampled), len(pids))


def _body(model: str, words: str, max_tokens: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": words}]
    return {"model": model, "messages": messages, "max_tokens": max_tokens}


async def _chat(http: httpx.AsyncClient, model: str, words: str, max_tokens: int) -> httpx.Response:
    return await http.post("/v1/chat/completions", json=_body(model, words, max_tokens))
