"""What the machine offers."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import psutil

from engine.mlx_backend.budget import CPU_SHARE, GPU_SHARE

_MEMORY_KEYS = ("max_recommended_working_set_size", "total_memory", "memory_size")
_CGROUP = Path("/sys/fs/cgroup")
_FILE_CACHE = ("inactive_file", "active_file")  # in memory.stat


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
    left_bytes = min(memory_bytes - mx.get_active_memory(), _free_bytes(info))
    return Machine(f"gpu ({name})", memory_bytes, left_bytes, GPU_SHARE)


def keep_resident() -> None:
    """Let Metal keep weights and arena in memory: what has been idle is slow to come back."""
    if mx.metal.is_available():
        mx.set_wired_limit(device_memory_bytes(mx.device_info()))


def _free_bytes(info: Mapping[str, str | int]) -> int:
    """What other processes leave of the GPU's memory; on Metal that is the machine's."""
    if mx.metal.is_available():
        return psutil.virtual_memory().available
    return int(info.get("free_memory", sys.maxsize))


def device_memory_bytes(info: Mapping[str, str | int]) -> int:
    """Memory of a GPU; Metal and CUDA call it differently."""
    return next((int(info[key]) for key in _MEMORY_KEYS if key in info), 0)


def within_cgroup(total_bytes: int, available_bytes: int, cgroup: Path) -> tuple[int, int]:
    """Total and available memory within the limit that a container (cgroup v2) sets, if any."""
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text()) - _file_cache_bytes(cgroup)
    except (OSError, ValueError):  # no cgroup v2, or "max": no limit
        return total_bytes, available_bytes
    return min(total_bytes, limit), min(available_bytes, max(limit - used, 0))


def _file_cache_bytes(cgroup: Path) -> int:
    """Files that the kernel keeps for the group, a checkpoint just read say, and would give up."""
    lines = (cgroup / "memory.stat").read_text().splitlines()
    return sum(int(count) for name, count in map(str.split, lines) if name in _FILE_CACHE)
