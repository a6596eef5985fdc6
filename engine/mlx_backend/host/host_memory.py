"""What this process may still take of the machine's memory.

Swap is left out: weights and KV are all read at every step, and would be read from the disk.
"""

import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil


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
