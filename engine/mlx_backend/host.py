"""The device that MLX computes on, and its memory."""

import ctypes
import os
import resource
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import mlx.core as mx
import psutil

GPU_SHARE = 0.8
CPU_SHARE = 0.1  # the machine is not ours alone, and the arena is touched at start
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


@dataclass(frozen=True, slots=True)
class HostMemory:
    total_bytes: int  # of the machine, or of the container
    left_bytes: int  # not in use by anybody, or kept for files only


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """Where a version of Linux's control groups says what it allows. Files hold bytes."""

    mount: str
    limits: tuple[str, ...]
    used: str
    file_cache: tuple[str, ...]  # in memory.stat: files that the kernel would give up


CGROUP_V1 = Hierarchy(
    "sys/fs/cgroup/memory",
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)
CGROUP_V2 = Hierarchy(
    "sys/fs/cgroup",
    ("memory.max", "memory.high"),
    "memory.current",
    ("inactive_file", "active_file"),
)


def host_memory() -> HostMemory:
    """What there is now."""
    memory = psutil.virtual_memory()
    within = within_cgroups(HostMemory(memory.total, memory.available), Path("/"))
    left = min(within.left_bytes, _uncommitted_bytes(Path("/")), _address_space_bytes())
    return HostMemory(within.total_bytes, max(left, 0))


def within_cgroups(memory: HostMemory, root: Path) -> HostMemory:
    """What the control groups of this process leave of a machine's memory.

    `root` is where /proc and /sys are. The limit of a service or a container may be set on any
    group above the process's own.
    """
    total, left = memory.total_bytes, memory.left_bytes
    for hierarchy, group in _groups(root):
        limit = min(_number(group / name) for name in hierarchy.limits)
        if limit < memory.total_bytes:
            used = _number(group / hierarchy.used) - _file_cache_bytes(group, hierarchy)
            total, left = min(total, limit), min(left, limit - used)
    return HostMemory(total, max(left, 0))


def _groups(root: Path) -> Iterator[tuple[Hierarchy, Path]]:
    """The directories of this process's groups and of those above them, as far as they show."""
    for line in _lines(root / "proc/self/cgroup"):  # such as 4:memory:/user.slice, or 0::/
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            hierarchy = CGROUP_V2
        elif "memory" in controllers.split(","):
            hierarchy = CGROUP_V1
        else:
            continue
        own = PurePosixPath(path)
        for group in (own, *own.parents):
            yield hierarchy, root / hierarchy.mount / group.relative_to("/")


def _file_cache_bytes(group: Path, hierarchy: Hierarchy) -> int:
    counts = (line.split() for line in _lines(group / "memory.stat"))
    return sum(int(count) for name, count in counts if name in hierarchy.file_cache)


def _uncommitted_bytes(root: Path) -> int:
    """What may still be allocated where the kernel promises no more than it has."""
    if _number(root / "proc/sys/vm/overcommit_memory") != 2:
        return sys.maxsize
    lines = (line.split() for line in _lines(root / "proc/meminfo"))
    kibibytes = {words[0]: int(words[1]) for words in lines}
    return 1024 * (kibibytes["CommitLimit:"] - kibibytes["Committed_AS:"])


def _address_space_bytes() -> int:
    """What `ulimit -v` leaves."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return sys.maxsize
    return limit - int(psutil.Process().memory_info().vms)


def _number(file: Path) -> int:
    """The file's only number; no limit where it says "max", or is not there."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return sys.maxsize


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []


OpenLibrary = Callable[[], Any]
"""Opens the functions that this process is linked with. Raises OSError."""

_RUSAGE_INFO_V2 = 2


class RusageInfoV2(ctypes.Structure):
    """`struct rusage_info_v2` of macOS's <sys/resource.h>."""

    _fields_ = (
        ("ri_uuid", ctypes.c_uint8 * 16),
        ("ri_user_time", ctypes.c_uint64),
        ("ri_system_time", ctypes.c_uint64),
        ("ri_pkg_idle_wkups", ctypes.c_uint64),
        ("ri_interrupt_wkups", ctypes.c_uint64),
        ("ri_pageins", ctypes.c_uint64),
        ("ri_wired_size", ctypes.c_uint64),
        ("ri_resident_size", ctypes.c_uint64),
        ("ri_phys_footprint", ctypes.c_uint64),
        ("ri_proc_start_abstime", ctypes.c_uint64),
        ("ri_proc_exit_abstime", ctypes.c_uint64),
        ("ri_child_user_time", ctypes.c_uint64),
        ("ri_child_system_time", ctypes.c_uint64),
        ("ri_child_pkg_idle_wkups", ctypes.c_uint64),
        ("ri_child_interrupt_wkups", ctypes.c_uint64),
        ("ri_child_pageins", ctypes.c_uint64),
        ("ri_child_elapsed_abstime", ctypes.c_uint64),
        ("ri_diskio_bytesread", ctypes.c_uint64),
        ("ri_diskio_byteswritten", ctypes.c_uint64),
    )


def process_bytes(open_library: OpenLibrary = lambda: ctypes.CDLL(None)) -> int:
    """On macOS the footprint, which Activity Monitor shows: buffers of Metal are in it, and not
    reliably in the resident set. Elsewhere, and where macOS does not say, the resident set.
    """
    footprint = _footprint(open_library) if sys.platform == "darwin" else None
    return int(psutil.Process().memory_info().rss) if footprint is None else footprint


def _footprint(open_library: OpenLibrary) -> int | None:
    """`ri_phys_footprint` by `proc_pid_rusage` of <libproc.h>; None where the call fails."""
    usage = RusageInfoV2()
    try:
        failed = open_library().proc_pid_rusage(os.getpid(), _RUSAGE_INFO_V2, ctypes.byref(usage))
    except (AttributeError, OSError):
        return None
    return None if failed else int(usage.ri_phys_footprint)
