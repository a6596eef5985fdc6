"""That MLX's buffer cache is bounded, and that its bound counts in the memory plan, on each device.

The machine is an input: what MLX computes on here is a CPU in all of them.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from engine.api import ModelError
from engine.mlx_backend import assembly, host
from engine.mlx_backend.cpu.blas import Blas
from engine.mlx_backend.host import Machine
from engine.values.settings import EngineConfig
from engine.values.stats import ModelMemory
from tests.checkpoints import SHALLOW, write_family

MIB = 1 << 20
MEMORY_BYTES = 4096 * MIB
USED_BYTES = 5 * MIB
FAKES = {
    name: Machine(f"{name} (fake)", MEMORY_BYTES, MEMORY_BYTES, MEMORY_BYTES, kv_share=0.5)
    for name in ("cpu", "gpu")
}


class Limits(NamedTuple):
    """What MLX's allocator is given."""

    memory: int
    cache: int


Plan = Callable[[str, int], tuple[Limits, ModelMemory]]


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """Load a model on a fake device, with a KV cache of that many bytes: the limits that MLX's
    allocator is given, and what is planned. Raises ModelError where it does not fit.
    """
    checkpoint = write_family(SHALLOW, tmp_path)
    config = EngineConfig(str(checkpoint), max_running=4, step_tokens=4096)

    def load(device: str, kv_cache_bytes: int) -> tuple[Limits, ModelMemory]:
        limits = list[Limits]()
        monkeypatch.setattr(host, "examine", lambda: FAKES[device])
        monkeypatch.setattr(host, "limit_allocator", lambda *given: limits.append(Limits(*given)))
        asked = replace(config, kv_cache_bytes=kv_cache_bytes)
        opened = replace(assembly.open_checkpoint(asked, checkpoint), used_bytes=USED_BYTES)
        backend = assembly.assemble_opened(asked, opened, Blas(), lambda line: None)
        return limits[-1], backend.memory().model

    return load


@pytest.mark.parametrize("device", FAKES)
def test_between_steps_the_cache_and_what_is_kept_are_within_the_plan(
    plan: Plan, device: str
) -> None:
    limits, memory = plan(device, MIB)
    assert 256 * MIB <= limits.cache < memory.workspace_bytes
    assert memory.kept_bytes + limits.cache <= memory.total_bytes <= MEMORY_BYTES
    assert limits.memory == USED_BYTES + MEMORY_BYTES


def test_on_a_gpu_the_cache_shares_the_bytes_of_a_step(plan: Plan) -> None:
    """MLX frees it before cache and arrays exceed the memory limit: the KV cache loses nothing."""
    limits, memory = plan("gpu", MIB)
    assert memory.workspace_bytes == 256 * MIB + limits.cache


def test_on_a_cpu_the_cache_counts_in_addition_to_a_step(plan: Plan) -> None:
    """MLX frees none of it there for other arrays."""
    (limits, on_cpu), (_, on_gpu) = plan("cpu", MIB), plan("gpu", MIB)
    assert on_cpu.workspace_bytes == on_gpu.workspace_bytes + limits.cache


def test_a_kv_cache_that_leaves_no_room_for_the_buffer_cache_is_refused_on_a_cpu_alone(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits, memory = plan("gpu", MIB)
    small = memory.kept_bytes + memory.workspace_bytes + limits.cache // 2
    for device, fake in FAKES.items():
        monkeypatch.setitem(FAKES, device, replace(fake, left_bytes=small, most_bytes=small))
    plan("gpu", MIB)
    with pytest.raises(ModelError, match="does not fit"):
        plan("cpu", MIB)
