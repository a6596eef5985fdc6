"""The memory of this process."""

import os
import resource
from contextlib import suppress

MEMORY_BYTES = 1024**3
"""A vocabulary of 150,000 takes a tenth of it."""


def bound_memory() -> None:
    """Linux holds a process to this; macOS takes it and does not, so there time alone bounds it."""
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    if most == resource.RLIM_INFINITY or most > MEMORY_BYTES:
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


class MemoryMeter:
    """How much of it is left, where the system says what is taken; else all is."""

    def __init__(self) -> None:
        self._sizes: int | None = None
        with suppress(OSError):
            self._sizes = os.open("/proc/self/statm", os.O_RDONLY)

    def bytes_left(self) -> int:
        limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
        return limit - self._taken_bytes()

    def _taken_bytes(self) -> int:
        """What RLIMIT_DATA counts, and the stack."""
        if self._sizes is None:
            return 0
        data_pages = os.pread(self._sizes, 200, 0).split()[5]
        return int(data_pages) * resource.getpagesize()
