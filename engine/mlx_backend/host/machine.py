"""The device that MLX computes on, and its memory."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace

import mlx.core as mx

from engine.mlx_backend.host.host_memory import host_memory
from engine.mlx_backend.loading.budget import CPU_SHARE, GPU_SHARE

_MEMORY_KEYS = ("max_recommended_working_set_size", "total_memory", "memory_size")


@dataclass(frozen=True, slots=True)
class Machine:
    """The device that MLX computes on by default, and its memory."""

    device: str  # "cpu" or "gpu", with its name
    memory_bytes: int
    left_bytes: int  # not in use by us or, on the CPU, by anybody
    most_bytes: int  # what we can have if told to take it: on Metal, others give way
    kv_share: float  # of what is left, what the KV cache takes if not told


def examine_for(memory_bytes: int | None) -> Machine:
    """The default device, now, of whose memory one may take so much; None: what is left of it."""
    found = examine()
    if memory_bytes is None:
        return found
    return replace(
        found,
        left_bytes=min(found.left_bytes, memory_bytes),
        most_bytes=min(found.most_bytes, memory_bytes),
        kv_share=1.0,
    )


def examine() -> Machine:
    """The default device, now."""
    info = mx.device_info()
    name = info.get("device_name", "unknown")
    host = host_memory()
    if mx.default_device() == mx.cpu:
        left_bytes = host.left_bytes
        return Machine(
            f"cpu ({name})",
            host.total_bytes,
            left_bytes,
            left_bytes,
            CPU_SHARE,
        )
    memory_bytes = device_memory_bytes(info)
    most_bytes = memory_bytes - mx.get_active_memory()
    if mx.metal.is_available():
        left_bytes = min(most_bytes, host.left_bytes)  # the GPU's memory is the machine's
    else:
        left_bytes = most_bytes = min(most_bytes, int(info.get("free_memory", sys.maxsize)))
    return Machine(f"gpu ({name})", memory_bytes, left_bytes, most_bytes, GPU_SHARE)


def keep_resident() -> None:
    """Let Metal keep weights and arena in memory: what has been idle is slow to come back."""
    if mx.metal.is_available():
        mx.set_wired_limit(device_memory_bytes(mx.device_info()))


def device_memory_bytes(info: Mapping[str, str | int]) -> int:
    """Memory of a GPU; Metal and CUDA call it differently."""
    return next((int(info[key]) for key in _MEMORY_KEYS if key in info), 0)
