"""What the system counts as this process's memory."""

import ctypes
import os
import sys
from collections.abc import Callable
from typing import Any

import psutil

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
