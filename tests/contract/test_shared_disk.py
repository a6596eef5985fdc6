"""Models of one daemon over one disk cache: a conversation outlives its model's turn in memory."""

import asyncio
from pathlib import Path

import mlx.core as mx
import pytest

from engine.api import Engine
from engine.launch import launch
from engine.values.request import Request, SamplingParams
from engine.values.settings import DiskCacheConfig, EngineConfig
from engine.values.tokens import pack
from kvstore.disk.types import MIB
from measuring.random_checkpoint import tiny_tokenizer, write_checkpoint
from tests.checkpoints import FAMILIES
from tests.golden.driving import random_tokens
from tools.events import events_of

pytestmark = [pytest.mark.process, pytest.mark.slow]

CONVERSATION = random_tokens(4_000, seed=1)


async def ask(engine: Engine, prompt: list[int]) -> int:
    """How many of its tokens were cached."""
    cached_tokens = -1
    async for event in events_of(
        engine, Request("only", pack(prompt), 2, SamplingParams(temperature=0))
    ):
        assert event.error is None
        if event.usage is not None:
            cached_tokens = event.usage.cached_tokens
    return cached_tokens


def test_a_conversation_is_found_when_its_model_comes_back(tmp_path: Path) -> None:
    """The first model is ended at once behind its answer, while the other one runs."""
    for seed, name in enumerate(("one", "another")):
        config = {**FAMILIES["qwen3"].config, "max_position_embeddings": 8_192}
        write_checkpoint(tmp_path / name, config, seed, tiny_tokenizer(), mx.float32)
    disk = DiskCacheConfig(tmp_path / "disk", 64 * MIB, shutdown_seconds=60.0)

    async def start(name: str) -> Engine:
        model = str(tmp_path / name)
        config = EngineConfig(model, kv_cache_bytes=32 * MIB, max_running=2, disk=disk)
        return await launch(config, lambda line: None)

    async def swap() -> int:
        one = await start("one")
        assert await ask(one, CONVERSATION) == 0
        other = await start("another")
        try:
            await one.drain(10.0)
            assert await ask(other, CONVERSATION[:300]) == 0
            one = await start("one")
            try:
                return await ask(one, CONVERSATION)
            finally:
                await one.drain(10.0)
        finally:
            await other.drain(10.0)

    assert asyncio.run(swap()) >= 0.97 * len(CONVERSATION)
