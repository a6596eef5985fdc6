"""Control groups of Linux with a limit of memory, in both of their versions."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from engine.process.cgroups import CGROUP_V2, MemoryGroup, memory_groups

LEAVE_SECONDS = 30.0
"""How long processes that have ended may take to leave their group."""


class NoGroups(Exception):
    """No control group can be made here. The text says why."""


class LimitedGroup:
    """A group below this process's own. Its limit is none until it is set."""

    def __init__(self, group: MemoryGroup) -> None:
        self.group = group
        self.procs = group.folder / "cgroup.procs"

    def limit(self, n_bytes: int) -> None:
        """Let its processes have so much memory. More is refused by ending one of them."""
        file = self.group.hierarchy.limits[0]
        (self.group.folder / file).write_text(f"{n_bytes}")
        swap = self.group.folder / "memory.swap.max"
        if swap.exists():
            swap.write_text("0")

    def joining(self, *command: str) -> list[str]:
        """A command line that runs the command in the group."""
        return ["/bin/sh", "-c", f'echo $$ > "{self.procs}"; exec "$@"', "sh", *command]


@contextmanager
def limited_group() -> Iterator[LimitedGroup]:
    """A group of its own, which is removed at the end. Raises NoGroups."""
    if sys.platform != "linux":
        raise NoGroups("control groups are Linux's")
    own = next(iter(memory_groups(Path("/"))), None)
    if own is None:
        raise NoGroups("this process is in no control group that can limit memory")
    folder = own.folder / f"rootstock-test-{os.getpid()}-{time.monotonic_ns()}"
    try:
        folder.mkdir()
    except OSError as error:
        raise NoGroups(f"{own.folder} does not allow groups: {error.strerror}") from error
    made = LimitedGroup(MemoryGroup(own.hierarchy, folder))
    try:
        if not (folder / own.hierarchy.limits[0]).exists():
            version = 2 if own.hierarchy is CGROUP_V2 else 1
            raise NoGroups(f"groups below {own.folder} (version {version}) cannot limit memory")
        yield made
    finally:
        deadline = time.monotonic() + LEAVE_SECONDS
        while time.monotonic() < deadline:
            with suppress(OSError):
                folder.rmdir()
                break
            time.sleep(0.05)
