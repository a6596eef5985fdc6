"""A stop and a kill for each kind of model: what the next daemon finds, beside what memory had."""

import asyncio
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from engine.values.settings import KVFormat
from load_tests.processes import STOP_SECONDS
from tests.checkpoints import FAMILIES
from tests.restart.asking import Heard, ask, client
from tests.restart.living import MIB, Daemon, checkpoint, disk_flags, living
from tests.restart.questions import token_ids

NAMES = (
    *("qwen3", "gemma3_text", "mamba2", "qwen3_next", "deepseek_v3"),
    *("qwen3_4bit", "qwen3_next_4bit"),
    "qwen3_q8",
)
LENGTHS = (1160, 4000)
ANSWER_TOKENS = 8
IDLE_SECONDS = 5.0
LEAST_SHARE = 0.97


def run(family: str, seed: int) -> None:
    """AssertionError where a daemon that follows says something else, or finds less."""
    with TemporaryDirectory(prefix="families-") as scratch:
        folder = Path(scratch)
        model = checkpoint(family, folder)
        randomness, ids = random.Random(seed), sorted(token_ids(model).values())
        prompts = [randomness.choices(ids, k=length) for length in LENGTHS]
        for ending in (signal.SIGTERM, signal.SIGKILL):
            told = _restart(model, folder, prompts, ending, FAMILIES[family].kv_format)
            print(f"{family}, seed {seed}, {ending.name}: {told}", flush=True)


def _restart(
    model: Path,
    folder: Path,
    prompts: Sequence[Sequence[int]],
    ending: signal.Signals,
    kv_format: KVFormat,
) -> str:
    disk = disk_flags(folder / f"kv-{ending.name}", 512 * MIB, kv_bytes=256 * MIB)
    flags = (*disk, "--kv-format", kv_format)
    with living(model, folder / "log", *flags) as daemon:
        cold = asyncio.run(_ask(daemon, prompts))
        if ending == signal.SIGKILL:
            time.sleep(IDLE_SECONDS)
        daemon.process.send_signal(ending)
        daemon.process.wait(STOP_SECONDS)
    with living(model, folder / "log", *flags) as daemon:
        found = asyncio.run(_ask(daemon, prompts))
        memory = asyncio.run(_ask(daemon, prompts))
        loaded = daemon.disk()["loaded_tokens"]
    told = list[str]()
    for first, again, best in zip(cold, found, memory, strict=True):
        assert not again.differs(first), again.differs(first)
        share, sooner = (
            again.cached_tokens / best.cached_tokens,
            first.seconds[0] / again.seconds[0],
        )
        assert share >= LEAST_SHARE, f"{again.cached_tokens} of {best.cached_tokens}"
        told.append(f"{again.cached_tokens} of {best.cached_tokens}, {sooner:.1f} times sooner")
    return f"{'; '.join(told)}; {loaded} tokens loaded"


async def _ask(daemon: Daemon, prompts: Sequence[Sequence[int]]) -> list[Heard]:
    """One after the other."""
    heard = [Heard() for _ in prompts]
    async with client(daemon.url) as http:
        for prompt, answer in zip(prompts, heard, strict=True):
            await ask(http, prompt, ANSWER_TOKENS, answer)
    return heard
