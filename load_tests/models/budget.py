"""Requests in random order for three models of which two fit.

    python -m load_tests.models.budget

Says how many failed, how often models were loaded, the most that all engines' processes took
together, sampled each 100 ms, beside the budget, and how soon the memory of a model that is
unloaded is back.
"""

import asyncio
import random
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from load_tests.checkpoint import checkpoint
from load_tests.models.daemon import Daemon, chat, served

SAMPLE_SECONDS = 0.1
MIB = 1 << 20
EMBEDDER = "embedder"


@dataclass
class Found:
    failures: list[str] = field(default_factory=list)
    resident_bytes: list[int] = field(default_factory=list)
    back_seconds: list[float] = field(default_factory=list)


async def ask(http: httpx.AsyncClient, model: str, number: int, found: Found) -> None:
    if model == EMBEDDER:
        body: dict[str, Any] = {"model": model, "input": f"request {number}"}
        answer = await http.post("/v1/embeddings", json=body)
    else:
        body = chat(model, f"request {number}", 16)
        answer = await http.post("/v1/chat/completions", json=body)
    if answer.status_code != 200:
        found.failures.append(f"{model}: {answer.status_code} {answer.text[:200]}")


async def sample(daemon: Daemon, found: Found) -> None:
    while True:
        found.resident_bytes.append(await asyncio.to_thread(daemon.resident_bytes))
        await asyncio.sleep(SAMPLE_SECONDS)


async def play(daemon: Daemon, n_requests: int, at_once: int, seed: int, found: Found) -> None:
    rng, slots = random.Random(seed), asyncio.Semaphore(at_once)
    names = list(daemon.models())
    async with httpx.AsyncClient(base_url=daemon.url, timeout=600) as http:

        async def one(number: int, model: str) -> None:
            async with slots:
                await ask(http, model, number, found)

        sampling = asyncio.create_task(sample(daemon, found))
        await asyncio.gather(*(one(i, rng.choice(names)) for i in range(n_requests)))
        sampling.cancel()


def unload_all(daemon: Daemon, found: Found) -> None:
    """From the moment when a model begins to go, how long its process has memory."""
    for name, model in daemon.models().items():
        if model["state"] != "ready":
            continue
        before = {engine.pid for engine in daemon.engines()}
        began = time.perf_counter()
        httpx.post(f"{daemon.url}/admin/models/unload", params={"model": name}, timeout=60)
        while {engine.pid for engine in daemon.engines()} == before:
            time.sleep(0.005)
        found.back_seconds.append(time.perf_counter() - began)


def entries() -> list[dict[str, Any]]:
    return [
        {"model": "rootstock-demo", "served_model_name": ["demo"]},
        {"model": str(checkpoint()), "served_model_name": ["first"], "preload": False},
        {
            "model": str(checkpoint(seed=1)),
            "served_model_name": [EMBEDDER],
            "preload": False,
            "pooling": "last",
        },
    ]


def main(
    requests: Annotated[int, typer.Option(help="All together.")] = 200,
    at_once: int = 8,
    budget_mib: Annotated[int, typer.Option(help="For two of the three.")] = 1700,
    seed: int = 0,
) -> None:
    found, began = Found(), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        settings = {"memory_budget": budget_mib * MIB, "log_level": "info"}
        with served(entries(), Path(folder), **settings) as daemon:
            asyncio.run(play(daemon, requests, at_once, seed, found))
            seconds = time.perf_counter() - began
            unload_all(daemon, found)
            needs = {name: model["needed_bytes"] for name, model in daemon.models().items()}
        log = (Path(folder) / "daemon.log").read_text()
    typer.echo(f"{len(found.failures)} of {requests} requests failed, in {seconds:.0f} s")
    for failure in found.failures[:5]:
        typer.echo(f"  {failure}")
    typer.echo(f"needs: {', '.join(f'{n} {b / MIB:.0f} MiB' for n, b in needs.items() if b)}")
    typer.echo(f"loads: {log.count(': loading weights')}")
    most = max(found.resident_bytes) / MIB
    over = sum(each > budget_mib * MIB for each in found.resident_bytes)
    typer.echo(
        f"most resident {most:.0f} MiB of {budget_mib} MiB; over it in {over} of "
        f"{len(found.resident_bytes)} samples"
    )
    typer.echo(f"memory back after {', '.join(f'{each:.2f} s' for each in found.back_seconds)}")


if __name__ == "__main__":
    typer.run(main)
