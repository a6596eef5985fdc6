"""What the machine offers."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import psutil

from engine.mlx_backend.budget import CPU_SHARE, GPU_SHARE

_MEMORY_KEYS = ("max_recommended_working_set_size", "total_memory", "memory_size")
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Machine:
    """The device that MLX computes on by default, and its memory."""

    device: str  # "cpu" or "gpu", with its name
    memory_bytes: int
    left_bytes: int  # not in use by us or, on the CPU, by anybody
    kv_share: float  # of what is left, what the KV cache may take


def examine() -> Machine:
    """The default device, now."""
    info = mx.device_info()
    name = info.get("device_name", "unknown")
    if mx.default_device() == mx.cpu:
        memory = psutil.virtual_memory()
        total, left = within_cgroup(memory.total, memory.available, _CGROUP)
        return Machine(f"cpu ({name})", total, left, CPU_SHARE)
    memory_bytes = device_memory_bytes(info)
    left_bytes = memory_bytes - mx.get_active_memory()
    return Machine(f"gpu ({name})", memory_bytes, left_bytes, GPU_SHARE)


def device_memory_bytes(info: Mapping[str, str | int]) -> int:
    """Memory of a GPU; Metal and CUDA call it differently."""
    return next((int(info[key]) for key in _MEMORY_KEYS if key in info), 0)


def within_cgroup(total_bytes: int, available_bytes: int, cgroup: Path) -> tuple[int, int]:
    """Total and available memory within the limit that a container (cgroup v2) sets, if any."""
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
    except (OSError, ValueError):  # no cgroup v2, or "max": no limit
        return total_bytes, available_bytes
    return min(total_bytes, limit), min(available_bytes, max(limit - used, 0))
