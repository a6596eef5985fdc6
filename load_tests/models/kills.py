"""One model's process is killed, or stopped, in the midst of its stream, again and again, while
another model streams.

    python -m load_tests.models.kills --times 50 --stops 5

Says whether each time the first stream ended with an error, the second as if nothing had happened,
and the next request to the first model was served.
"""

import asyncio
import json
import signal
import tempfile
from pathlib import Path
from typing import Annotated, Any

import httpx
import psutil
import typer

from load_tests.checkpoint import checkpoint
from load_tests.models.daemon import Daemon, chat, served

TOKENS = 400


async def stream(http: httpx.AsyncClient, model: str, number: int, heard: asyncio.Event) -> str:
    """`stop`, `length` or `error: ...`; `heard` is set at the third event."""
    body = chat(model, f"tell {number}", TOKENS, stream=True, ignore_eos=True)
    n_events, end = 0, "nothing"
    async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event: dict[str, Any] = json.loads(line.removeprefix("data: "))
            n_events += 1
            if n_events == 3:
                heard.set()
            if "error" in event:
                end = f"error: {event['error']['message']}"
            elif event["choices"] and event["choices"][0]["finish_reason"]:
                end = event["choices"][0]["finish_reason"]
    return end


async def one(http: httpx.AsyncClient, victim: psutil.Process, number: int, kind: int) -> list[str]:
    """What went wrong."""
    heard, other = asyncio.Event(), asyncio.Event()
    dying = asyncio.create_task(stream(http, "first", number, heard))
    living = asyncio.create_task(stream(http, "demo", number, other))
    await heard.wait()
    await other.wait()
    victim.send_signal(kind)
    wrong = []
    if not (ended := await dying).startswith("error"):
        wrong.append(f"the stream of the dead model ended with {ended}")
    if (ended := await living) != "length":
        wrong.append(f"the other model's stream ended with {ended}")
    answer = await http.post("/v1/chat/completions", json=chat("first", f"again {number}", 3))
    if answer.status_code != 200:
        wrong.append(f"the next request: {answer.status_code} {answer.text[:200]}")
    return wrong


async def play(daemon: Daemon, times: int, stops: int) -> int:
    n_wrong = 0
    async with httpx.AsyncClient(base_url=daemon.url, timeout=600) as http:
        await http.post("/v1/chat/completions", json=chat("first", "hello", 3))
        for number in range(times):
            kind = signal.SIGSTOP if number < stops else signal.SIGKILL
            victim = daemon.engines()[-1]  # loaded last
            if wrong := await one(http, victim, number, kind):
                n_wrong += 1
                typer.echo(f"{number}, {signal.Signals(kind).name}: {'; '.join(wrong)}")
    return n_wrong


def main(
    times: int = 50, stops: Annotated[int, typer.Option(help="Of these, SIGSTOP.")] = 5
) -> None:
    models: list[dict[str, Any]] = [
        {"model": "rootstock-demo", "served_model_name": ["demo"], "pinned": True},
        {"model": str(checkpoint()), "served_model_name": ["first"]},
    ]
    with (
        tempfile.TemporaryDirectory() as folder,
        served(models, Path(folder), memory_budget=4 << 30) as daemon,
    ):
        n_wrong = asyncio.run(play(daemon, times, stops))
    typer.echo(f"{times - n_wrong} of {times} deaths harmed nobody else, {stops} of them SIGSTOP")


if __name__ == "__main__":
    typer.run(main)
