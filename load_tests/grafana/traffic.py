"""What a daemon can meet with: shared prompts, a crowd, requests that come to nothing, a disk."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

import httpx

from load_tests.client import Target, connected
from load_tests.grafana import disk
from load_tests.scenarios.kinds import Load
from load_tests.scenarios.load import play
from load_tests.scenarios.workloads import build

MODEL = "rootstock-demo"
FLAGS = (
    "--demo",
    *("--max-running", "4"),
    *("--max-waiting", "16"),
    *("--kv-cache-bytes", "10MiB"),
    *("--memory-budget", "2GiB"),
)
"""Of a daemon that is small enough to be filled: users wait, blocks are evicted; and with a budget
of memory, or nothing were counted of it."""

SHARED = Load(
    description="two system prompts, eight users at a time",
    concurrency=8,
    conversations=24,
    system_prompts=2,
    system_words=60,
    user_words=15,
    output_tokens=96,
)
MESSAGES = [{"role": "user", "content": "Say something about trees."}]
CROWD = 40
GONE_SECONDS = 0.3
ROUNDS = 3
"""What is counted first has no rate yet: it must be counted again."""


async def drive(target: Target, disk_folder: Path, seed: int) -> None:
    """Raises TargetError where what is no trouble is not answered."""
    for number in range(ROUNDS):
        await play(build(SHARED, seed + number), target)
        async with connected(target) as asker:
            await _trouble(asker.http, target)
        await disk.drive(target, disk_folder, seed + number)


async def _trouble(http: httpx.AsyncClient, target: Target) -> None:
    chat = f"{target.base_url}/chat/completions"
    await asyncio.gather(*(_post(http, chat, max_tokens=32) for _ in range(CROWD)))  # some are 429
    await asyncio.gather(
        _post(http, chat, n=4, temperature=1, max_tokens=64),  # answers that part
        *(_post(http, chat, max_tokens=400, ignore_eos=True) for _ in range(2)),
        _post(http, chat, max_tokens=200, stop=["e"]),
        _leave(http, chat),
    )
    await _post(http, chat, messages=[{"role": "user", "content": "tree " * 5000}])  # too long
    await _post(http, chat, model="no-such-model")
    await _post(http, f"{target.base_url}/no-such-route")
    await http.get(f"{target.base_url}/models", headers={"Host": "elsewhere.example"})


async def _post(http: httpx.AsyncClient, url: str, **fields: object) -> None:
    await http.post(url, json=_body(fields))


async def _leave(http: httpx.AsyncClient, url: str) -> None:
    """Ask for a long answer, and go."""
    body = _body({"max_tokens": 1000, "ignore_eos": True, "stream": True})
    async with http.stream("POST", url, json=body):
        await asyncio.sleep(GONE_SECONDS)


def _body(fields: Mapping[str, object]) -> dict[str, object]:
    return {"messages": MESSAGES, **fields}
