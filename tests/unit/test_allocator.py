"""What MLX's allocator is told of the machine."""

from collections.abc import Iterator

import mlx.core as mx
import pytest

from engine.mlx_backend.host import Machine
from engine.mlx_backend.loading.memory import (
    AllocatorLimits,
    allocator_limits,
    limit_allocator,
)

SHARED = Machine("gpu (shared)", memory_bytes=80, left_bytes=30, most_bytes=30, kv_share=0.8)


@pytest.fixture
def restored() -> Iterator[None]:
    memory, cache = mx.set_memory_limit(1 << 30), mx.set_cache_limit(1 << 20)
    yield
    mx.set_memory_limit(memory)
    mx.set_cache_limit(cache)


def test_what_others_use_is_not_ours() -> None:
    assert allocator_limits(SHARED, used_bytes=5, step_bytes=7) == AllocatorLimits(35, 7)


@pytest.mark.usefixtures("restored")
def test_mlx_is_told() -> None:
    limit_allocator(AllocatorLimits(memory=1 << 33, cache=1 << 25))
    assert mx.set_memory_limit(1 << 30) == 1 << 33
    assert mx.set_cache_limit(1 << 20) == 1 << 25
