"""What MLX's allocator is told of the machine, and what is known of the device."""

from collections.abc import Iterator

import mlx.core as mx
import pytest

from engine.mlx_backend import host
from engine.mlx_backend.host import FusedAttention, HostMemory, limit_allocator

GIB = 1 << 30


@pytest.fixture
def restored() -> Iterator[None]:
    memory, cache = mx.set_memory_limit(1 << 30), mx.set_cache_limit(1 << 20)
    yield
    mx.set_memory_limit(memory)
    mx.set_cache_limit(cache)


@pytest.mark.usefixtures("restored")
def test_mlx_is_told() -> None:
    limit_allocator(memory_bytes=1 << 33, cache_bytes=1 << 25)
    assert mx.set_memory_limit(1 << 30) == 1 << 33
    assert mx.set_cache_limit(1 << 20) == 1 << 25


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize(("given", "wired"), [(12 * GIB, 12 * GIB), (64 * GIB, 48 * GIB)])
def test_metal_wires_what_an_engine_is_given_and_no_more_than_the_system_allows(
    monkeypatch: pytest.MonkeyPatch, given: int, wired: int
) -> None:
    limits = list[int]()
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "set_wired_limit", limits.append)
    info = {"memory_size": 64 * GIB, "max_recommended_working_set_size": 48 * GIB}
    monkeypatch.setattr(mx, "device_info", lambda: info)
    limit_allocator(given, cache_bytes=0)
    assert limits == [wired]


def test_elsewhere_nothing_is_wired(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = list[int]()
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    monkeypatch.setattr(mx, "set_wired_limit", limits.append)
    for name in ("set_memory_limit", "set_cache_limit"):
        monkeypatch.setattr(mx, name, lambda limit: 0)
    limit_allocator(GIB, GIB)
    assert limits == []


@pytest.mark.parametrize(
    ("metal", "info", "fused"),
    [
        (True, {"max_recommended_working_set_size": 48 * GIB}, FusedAttention.METAL),
        (False, {"total_memory": 48 * GIB, "compute_capability_major": 9}, FusedAttention.CUDA),
        (False, {"total_memory": 48 * GIB, "compute_capability_major": 7}, FusedAttention.NONE),
    ],
)
def test_which_fused_attention_a_gpu_has(
    monkeypatch: pytest.MonkeyPatch,
    metal: bool,
    info: dict[str, str | int],
    fused: FusedAttention,
) -> None:
    """cuDNN's needs Ampere, of compute capability 8."""
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(mx, "device_info", lambda: info | {"device_name": "fake"})
    monkeypatch.setattr(mx.metal, "is_available", lambda: metal)
    monkeypatch.setattr(host, "host_memory", lambda: HostMemory(64 * GIB, 32 * GIB))
    found = host.examine()
    assert (found.device, found.memory_bytes, found.fused) == ("gpu (fake)", 48 * GIB, fused)
    assert found.left_bytes <= (32 if metal else 48) * GIB
    assert host.examine_for(8 * GIB).most_bytes == 8 * GIB
