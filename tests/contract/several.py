"""Daemons of several fake models, loaded when they are asked for."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from engine.api import Engine
from engine.values.settings import EngineConfig
from engine.values.stats import EngineStats, MemoryStats, ModelMemory
from server.settings import Settings
from server.settings.models import ModelSettings
from tests.contract.fake_engine import ByteTokenizer, FakeEngine, Gate, Script

HI = {"role": "user", "content": "hi"}
MIB = 1 << 20
MEMORY = ModelMemory(20 * MIB, 50 * MIB, 0, 330 * MIB, process_bytes=0, total_bytes=400 * MIB)


class Small(FakeEngine):
    """What it takes of memory is what was computed for it."""

    async def stats(self) -> EngineStats:
        stats = await super().stats()
        return replace(stats, memory=MemoryStats(MEMORY, 0, 0, 0))


class Engines:
    """Starts a fake engine for each load, when its gate is open, or says why not."""

    def __init__(self) -> None:
        self.started: list[EngineConfig] = []
        self.made: list[FakeEngine] = []
        self.gate: Gate | None = None
        self.failure: Exception | None = None
        self.tokenizer = ByteTokenizer()

    async def __call__(self, config: EngineConfig, report: Callable[[str], None]) -> Engine:
        self.started.append(config)
        report("loading weights")
        if self.gate is not None:
            await self.gate.passed()
        if self.failure is not None:
            raise self.failure
        script = Script(answers=[f"I am load {len(self.started)}"])
        self.made.append(Small(script, tokenizer=self.tokenizer))
        return self.made[-1]


def settings_of(**more: Any) -> Settings:
    """Three models, of which the first two fit."""
    models = (
        ModelSettings(model="rootstock-demo", served_model_name=("one", "uno")),
        ModelSettings(model="rootstock-demo", served_model_name=("two",), preload=False),
        ModelSettings(model="rootstock-demo", served_model_name=("three",), preload=False),
    )
    given: dict[str, Any] = {"port": 0, "models": models, "memory_budget": 1300 * MIB}
    return Settings(**(given | more))


def needs(config: EngineConfig, budget_bytes: int, storage_bytes: int) -> ModelMemory:
    """In place of a process that asks MLX."""
    kv_bytes = config.kv_cache_bytes or storage_bytes
    return ModelMemory(20 * MIB, kv_bytes, 0, 280 * MIB, 0, total_bytes=300 * MIB + kv_bytes)
