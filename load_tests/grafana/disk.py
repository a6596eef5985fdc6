"""What a disk cache can meet with: prefixes to keep, to bring back, and a disk that lost them."""

import asyncio
import time
from pathlib import Path

import httpx

from load_tests.client import Target, TargetError, connected
from load_tests.scenarios.kinds import Load
from load_tests.scenarios.load import play
from load_tests.scenarios.workloads import build

LONG = Load(
    description="prompts that are worth a look at the disk",
    concurrency=1,
    conversations=3,
    system_words=250,
    system_prompts=3,
    user_words=10,
    output_tokens=8,
)
WRITE_SECONDS = 30.0
LOOK_SECONDS = 0.2


def flags(folder: Path) -> tuple[str, ...]:
    """Of a daemon that keeps everything there."""
    kept = ("--disk-cache", str(folder), "--disk-cache-bytes", "1GiB")
    return (*kept, "--disk-cache-write", "all")


async def drive(target: Target, folder: Path, seed: int) -> None:
    """Have prompts written, loaded, and not found any more. Raises TargetError."""
    workload = build(LONG, seed)
    async with connected(target) as asker:
        await play(workload, target)
        await _leave_the_disk_alone(asker.http, target)
        await play(workload, target)
        await _leave_the_disk_alone(asker.http, target)
        ruin(folder)
        await play(workload, target)


def ruin(folder: Path) -> None:
    """Every payload becomes zeros, in place."""
    for payload in folder.rglob("*.kv"):
        with payload.open("r+b") as file:
            file.write(bytes(payload.stat().st_size))


async def _leave_the_disk_alone(http: httpx.AsyncClient, target: Target) -> None:
    """Have memory forget all, until nothing is on its way to the disk: who is asked to forget also
    looks again at what there is.
    """
    cache = f"{target.base_url.removesuffix('/v1')}/admin/cache"
    deadline = time.monotonic() + WRITE_SECONDS
    while time.monotonic() < deadline:
        cleared = await http.post(f"{cache}/clear", params={"tiers": "memory"})
        stats = (await http.get(f"{cache}/stats")).raise_for_status().json()
        if cleared.is_success and not stats["disk"]["buffered_bytes"]:
            return
        await asyncio.sleep(LOOK_SECONDS)
    raise TargetError(f"the disk cache still writes after {WRITE_SECONDS:g} s")
