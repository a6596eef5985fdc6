"""Linux's control groups of this process, in both of their versions."""

import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple


class Hierarchy(NamedTuple):
    """Files of one version of the control groups. Their numbers are bytes."""

    mount: str
    limits: tuple[str, ...]
    used: str
    file_cache: tuple[str, ...]  # keys in memory.stat of cached files, which the kernel can drop
    events: str  # the file that counts processes ended for lack of memory, as oom_kill


CGROUP_V1 = Hierarchy(
    "sys/fs/cgroup/memory",
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
    "memory.oom_control",
)
CGROUP_V2 = Hierarchy(
    "sys/fs/cgroup",
    ("memory.max", "memory.high"),
    "memory.current",
    ("inactive_file", "active_file"),
    "memory.events",
)


class MemoryGroup(NamedTuple):
    """A control group: its directory, and the files that it has."""

    hierarchy: Hierarchy
    folder: Path

    def limit_bytes(self) -> int:
        """The memory that its processes may have; `sys.maxsize` where nothing limits it."""
        return min(number(self.folder / name) for name in self.hierarchy.limits)

    def used_bytes(self) -> int:
        """The memory that its processes have, without cached files. `sys.maxsize` where it cannot
        be read.
        """
        cached = sum(counts(self.folder / "memory.stat", self.hierarchy.file_cache).values())
        return number(self.folder / self.hierarchy.used) - cached

    def kills(self) -> int:
        """How many of its processes the kernel has ended for lack of memory, since it exists."""
        return sum(counts(self.folder / self.hierarchy.events, ("oom_kill",)).values())


def memory_groups(root: Path) -> Iterator[MemoryGroup]:
    """The groups of this process that may limit its memory: its own, and all above them. `root` is
    the directory with /proc and /sys. A group that has no files may be among them.
    """
    for line in lines(root / "proc/self/cgroup"):  # such as 4:memory:/user.slice, or 0::/
        _, _, named = line.partition(":")
        controllers, _, path = named.partition(":")
        if not path.startswith("/"):
            continue
        if controllers == "":
            hierarchy = CGROUP_V2
        elif "memory" in controllers.split(","):
            hierarchy = CGROUP_V1
        else:
            continue
        own = PurePosixPath(path)
        for group in (own, *own.parents):
            yield MemoryGroup(hierarchy, root / hierarchy.mount / group.relative_to("/"))


def counts(file: Path, names: tuple[str, ...]) -> dict[str, int]:
    """The numbers with these names in a file of lines such as `anon 290`, or `SwapFree: 12 kB`."""
    words = (line.split() for line in lines(file))
    return {
        each[0]: int(each[1])
        for each in words
        if len(each) > 1 and each[0] in names and each[1].isdecimal()
    }


def number(file: Path) -> int:
    """The only number in a file; `sys.maxsize` if the file contains "max" or does not exist."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return sys.maxsize


def lines(file: Path) -> list[str]:
    """The lines of a file; none if it cannot be read."""
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
