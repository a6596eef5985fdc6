"""How much memory a machine has and a process takes, and what steps take of it."""

import ctypes
import logging
import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import psutil
import pytest

from engine.mlx_backend import host
from engine.mlx_backend.host import (
    QUIET_SECONDS,
    HostMemory,
    MemoryMeter,
    host_memory,
    is_lack_of_memory,
    process_bytes,
    within_cgroups,
)
from engine.values.stats import ModelMemory

MACHINE = HostMemory(1000, 900)


def _write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def _group_v2(path: str, limit: str, used: int) -> dict[str, str]:
    group = f"sys/fs/cgroup{path}"
    return {
        f"{group}/memory.max": f"{limit}\n",
        f"{group}/memory.current": f"{used}\n",
        f"{group}/memory.stat": "anon 290\nactive_file 20\ninactive_file 100\n",
    }


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"": "max"}, MACHINE),
        ({"": "500"}, HostMemory(500, 200)),
        ({"": "2000"}, MACHINE),
        ({"/user.slice": "500", "/user.slice/ours": "max"}, HostMemory(500, 200)),
    ],
)
def test_the_limits_of_a_container_and_of_a_group_above_it_count(
    tmp_path: Path, limits: dict[str, str], expected: HostMemory
) -> None:
    assert within_cgroups(MACHINE, tmp_path) == MACHINE
    for group, limit in limits.items():
        _write(tmp_path, _group_v2(group, limit, 420))
    *_, own = limits
    _write(tmp_path, {"proc/self/cgroup": f"0::{own or '/'}\n"})
    assert within_cgroups(MACHINE, tmp_path) == expected


def test_the_first_version_of_groups_is_read_as_well(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory/docker/1"
    _write(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpu:/docker/1\n4:memory:/docker/1\n0::/\n",
            f"{group}/memory.limit_in_bytes": "500\n",
            f"{group}/memory.usage_in_bytes": "700\n",
            f"{group}/memory.stat": "total_inactive_file 60\ntotal_active_file 40\n",
        },
    )
    assert within_cgroups(MACHINE, tmp_path) == HostMemory(500, 0)


def test_this_machine_has_memory_left() -> None:
    memory = host_memory()
    assert 0 < memory.left_bytes <= memory.total_bytes


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


MIB = 1 << 20


def take(mebibytes: int) -> None:
    array = mx.zeros((mebibytes, MIB // 4))
    mx.eval(array)
    del array
    mx.synchronize()  # a GPU gives back what a command buffer used when that has completed


class Meter(MemoryMeter):
    """A meter of steps that take what a test says, with a clock that is set by hand."""

    def __init__(self, workspace: int) -> None:
        self.now = 0.0
        self.used = mx.get_active_memory()
        super().__init__(ModelMemory(0, 0, 0, 0, 0, 0), workspace, self.used, lambda: self.now)

    def take(self, mebibytes: int, error: Exception | None = None) -> None:
        with self.step():
            take(mebibytes)
            if error is not None:
                raise error


@pytest.mark.parametrize(
    "words",
    [
        "[malloc] Unable to allocate 137438953472 bytes.",
        "[metal::malloc] Attempting to allocate 9 bytes which is greater than the maximum allowed",
        "[METAL] Command buffer execution failed: Insufficient Memory "
        "(00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)",
        "cudaMallocAsync(&data, size, stream) failed: out of memory",
        "CUDA error: cudaErrorMemoryAllocation",
    ],
)
def test_a_lack_of_memory_is_recognized_in_the_words_of_every_device(words: str) -> None:
    assert is_lack_of_memory(RuntimeError(words))


@pytest.mark.parametrize(
    "words", ["no kernel of this name", "[METAL] Command buffer execution failed: Caused GPU Hang"]
)
def test_other_failures_are_no_lack_of_memory(words: str) -> None:
    assert not is_lack_of_memory(RuntimeError(words))
    assert is_lack_of_memory(MemoryError(words))


def test_a_step_within_its_reservation_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    meter = Meter(64 * MIB)
    meter.take(16)
    assert not caplog.records


def test_a_step_that_took_more_is_warned_of_with_both_figures_and_not_at_once_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    meter = Meter(8 * MIB)
    for now in (0.0, 1.0, QUIET_SECONDS - 1, QUIET_SECONDS):
        meter.now = now
        meter.take(32)
    said = [record.getMessage() for record in caplog.records]
    line = "a step took 32 MiB on top of weights and KV cache; 8 MiB were reserved"
    assert said == [line, line]


@pytest.mark.device
def test_the_peak_is_of_all_steps_since_the_model_was_loaded() -> None:
    take(64)
    kept = mx.ones((4, MIB // 4))
    mx.eval(kept)
    meter = Meter(1 << 40)
    meter.take(32)
    meter.take(16)
    stats = meter.stats()
    assert 32 * MIB <= stats.peak < 40 * MIB
    assert stats.active == mx.get_active_memory() - meter.used == 0
    assert stats.model.process_bytes > 0


def test_resident_is_what_the_system_counts_as_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "process_bytes", lambda: 110 * MIB)
    assert Meter(0).stats().model.process_bytes == 110 * MIB


@pytest.mark.parametrize("error", [None, RuntimeError("out of memory")])
def test_a_step_that_fails_is_measured_as_well(
    error: Exception | None, caplog: pytest.LogCaptureFixture
) -> None:
    meter = Meter(8 * MIB)
    if error is None:
        meter.take(32)
    else:
        with pytest.raises(RuntimeError, match="out of memory"):
            meter.take(32, error)
    assert len(caplog.records) == 1
