"""The memory of a process, as macOS counts it."""

import ctypes
import sys
from collections.abc import Callable
from typing import Any

_RUSAGE_INFO_V2, _RUSAGE_NUMBERS, _PHYS_FOOTPRINT = 2, 20, 9
"""`struct rusage_info_v2` of macOS's <sys/resource.h> is a UUID of 16 bytes, and 18 numbers of 8.
Read as 20 numbers, the tenth is `ri_phys_footprint`."""


def footprint_bytes(
    pid: int, open_library: Callable[[], Any] = lambda: ctypes.CDLL(None)
) -> int | None:
    """The footprint that Activity Monitor shows, which includes Metal's buffers:
    `ri_phys_footprint` by `proc_pid_rusage` of <libproc.h>. None on other systems, and where the
    call fails.

    `open_library` opens the libraries that this process is linked with, or raises OSError.
    """
    if sys.platform != "darwin":
        return None
    usage = (ctypes.c_uint64 * _RUSAGE_NUMBERS)()
    try:
        failed = open_library().proc_pid_rusage(pid, _RUSAGE_INFO_V2, ctypes.byref(usage))
    except (AttributeError, OSError):
        return None
    return None if failed else usage[_PHYS_FOOTPRINT]
