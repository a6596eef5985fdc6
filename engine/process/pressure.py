"""Reads how short of memory the machine is: macOS's own verdict, Linux's stalls and control groups.

A reading takes about a millisecond, and belongs on neither an event loop nor an engine's thread.
"""

import ctypes
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import psutil

from engine.process.cgroups import MemoryGroup, counts, lines, memory_groups
from engine.process.footprint import footprint_bytes
from engine.values.pressure import PressureSource, Reading
from engine.values.stats import readable_bytes

_LEVEL = b"kern.memorystatus_vm_pressure_level"
_LEVELS = {1: (0.0, "normal"), 2: (0.5, "warning"), 4: (1.0, "critical")}
"""Of macOS's memory pressure: <dispatch/source.h> has the numbers, DISPATCH_MEMORYPRESSURE_*."""

_MEMINFO = ("MemTotal:", "MemAvailable:", "SwapTotal:", "SwapFree:")


class PressureSources:
    """The sources that this system has. Keeps what the last reading has counted, so one thread at a
    time reads.
    """

    def __init__(
        self,
        root: Path = Path("/"),
        open_library: Callable[[], Any] = lambda: ctypes.CDLL(None),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`root` is the directory with /proc and /sys. `open_library` opens the libraries that this
        process is linked with, or raises OSError.
        """
        self._root = root
        self._open_library = open_library
        self._clock = clock
        self._stalled: dict[Path, tuple[float, int]] = {}  # when it was read, and microseconds
        self._kills: dict[Path, int] = {}

    def read(self, engines_bytes: int = 0) -> tuple[Reading, ...]:
        """What every source says now; nothing where none can be read. Shares of a time and counts
        are of the time since the last call, so that the first call has none. `engines_bytes`: the
        memory of the processes of all engines.
        """
        read = self._on_a_mac(engines_bytes) if sys.platform == "darwin" else self._on_linux()
        return tuple(read)

    def _on_a_mac(self, engines_bytes: int) -> Iterator[Reading]:
        level = ctypes.c_int()
        size = ctypes.c_size_t(ctypes.sizeof(level))
        try:
            failed = self._open_library().sysctlbyname(
                _LEVEL, ctypes.byref(level), ctypes.byref(size), None, ctypes.c_size_t(0)
            )
        except (AttributeError, OSError):
            failed = -1
        if not failed and level.value in _LEVELS:
            share, name = _LEVELS[level.value]
            yield Reading(
                PressureSource.SYSTEM, share, f"macOS says that memory pressure is {name}"
            )
        own_bytes = footprint_bytes(os.getpid(), self._open_library)
        if own_bytes is not None:
            total, used = int(psutil.virtual_memory().total), own_bytes + engines_bytes
            words = f"the daemon takes {_of(used, total)} of this Mac's memory"
            yield Reading(PressureSource.FOOTPRINT, used / total, words)

    def _on_linux(self) -> Iterator[Reading]:
        meminfo = counts(self._root / "proc/meminfo", _MEMINFO)  # KiB
        total = left = 0
        if len(meminfo) == len(_MEMINFO):
            memory, available, swap, free = (1024 * meminfo[name] for name in _MEMINFO)
            total, left = memory + swap, available + free
            words = f"{_of(total - left, total)} of the machine's memory and swap are in use"
            yield Reading(PressureSource.MACHINE, 1 - left / max(total, 1), words)
        stalls = self._root / "proc/pressure/memory"
        yield from self._stalls(PressureSource.STALLS, stalls, "the machine")
        groups = list(memory_groups(self._root))
        if groups:
            stalls = groups[0].folder / "memory.pressure"
            yield from self._stalls(PressureSource.GROUP_STALLS, stalls, "the control group")
        limiting = [group for group in groups if group.limit_bytes() < (total or sys.maxsize)]
        yield from self._fullest(limiting)
        yield from self._killed(limiting)

    def _stalls(self, source: PressureSource, file: Path, whose: str) -> Iterator[Reading]:
        """The share of the time since the last reading in which no task went on, because all that
        could run waited for memory. Another container that is short of its own leaves ours running.
        """
        total = next((_total(line) for line in lines(file) if line.startswith("full ")), None)
        if total is None:
            return
        now, before = self._clock(), self._stalled.get(file)
        self._stalled[file] = now, total
        if before is not None and now > before[0]:
            share = min(max((total - before[1]) / 1e6 / (now - before[0]), 0.0), 1.0)
            words = f"all tasks of {whose} waited for memory {share:.0%} of the time"
            yield Reading(source, share, words)

    def _fullest(self, groups: list[MemoryGroup]) -> Iterator[Reading]:
        """The group whose limit is most in use, of those that limit memory."""
        used = [(group.used_bytes(), group.limit_bytes(), group) for group in groups]
        known = [each for each in used if each[0] < sys.maxsize and each[1] > 0]
        if known:
            n_bytes, limit, group = max(known, key=lambda each: each[0] / each[1])
            name = group.folder.relative_to(self._root / group.hierarchy.mount)
            words = (
                f"{_of(n_bytes, limit)} of the control group {PurePosixPath('/', name)} are in use"
            )
            yield Reading(PressureSource.GROUP, max(n_bytes, 0) / limit, words)

    def _killed(self, groups: list[MemoryGroup]) -> Iterator[Reading]:
        """Whether the kernel has ended a process of these groups since the last reading."""
        now = {group.folder: group.kills() for group in groups}
        before, self._kills = self._kills, now
        n_killed = max((now[one] - before[one] for one in now.keys() & before.keys()), default=None)
        if n_killed is not None:
            words = f"the kernel has ended {n_killed} processes of the control group"
            yield Reading(PressureSource.KILLS, float(n_killed > 0), words)


def open_sources() -> PressureSources | None:
    """The sources of this system; None where none can be read."""
    sources = PressureSources()
    return sources if sources.read() else None


def _total(line: str) -> int | None:
    """Microseconds in a line such as `full avg10=0.00 avg60=0.00 avg300=0.00 total=12`."""
    _, found, text = line.rpartition("total=")
    return int(text) if found and text.isdecimal() else None


def _of(used: int, total: int) -> str:
    """`11.8 GiB of 12.0 GiB (98%)`."""
    used = max(used, 0)
    return f"{readable_bytes(used)} of {readable_bytes(total)} ({used / max(total, 1):.0%})"
