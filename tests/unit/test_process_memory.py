"""Which of the system's counts is the process's memory, on Linux and on macOS."""

import ctypes
import os
import struct
import sys
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from engine.mlx_backend.host import process_bytes

FOOTPRINT = 110 << 30
RUSAGE_INFO_V2 = 2
OFFSET, SIZE = 72, 160
"""Of `ri_phys_footprint` in `struct rusage_info_v2`, after 16 bytes and seven numbers of 8, and of
the whole: macOS's <sys/resource.h>."""


class MacOS:
    """Implements `proc_pid_rusage` as macOS does: it writes the struct that it is given."""

    def __init__(self, result: int = 0) -> None:
        self._result = result

    def proc_pid_rusage(self, pid: int, flavor: int, usage: Any) -> int:
        assert (pid, flavor) == (os.getpid(), RUSAGE_INFO_V2)
        assert ctypes.sizeof(usage._obj) == SIZE
        written = bytearray(SIZE)
        struct.pack_into("<Q", written, OFFSET, FOOTPRINT)
        ctypes.memmove(usage, bytes(written), SIZE)
        return self._result


def no_library() -> object:
    raise OSError("there is none")


def test_on_macos_it_is_the_footprint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which has Metal's buffers in it."""
    monkeypatch.setattr(sys, "platform", "darwin")
    assert process_bytes(MacOS) == FOOTPRINT


@pytest.mark.parametrize("library", [lambda: MacOS(result=-1), object, no_library])
def test_where_macos_does_not_say_it_is_the_resident_set(
    monkeypatch: pytest.MonkeyPatch, library: Callable[[], object]
) -> None:
    monkeypatch.setattr(psutil, "Process", Resident)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert process_bytes(library) == Resident.rss


def test_on_linux_it_is_the_resident_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "Process", Resident)
    monkeypatch.setattr(sys, "platform", "linux")
    assert process_bytes(no_library) == Resident.rss


def test_this_system_says_something() -> None:
    assert process_bytes() > 1 << 20


class Resident:
    """A process as psutil shows it."""

    rss = 46 << 30

    def memory_info(self) -> "Resident":
        return self
