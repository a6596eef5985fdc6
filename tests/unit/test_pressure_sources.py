"""What the machine says of its memory: /proc, /sys, and macOS's libraries in their place."""

import ctypes
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.process import footprint
from engine.process.pressure import PressureSources, open_sources
from engine.values.pressure import PressureSource, Reading

GIB = 1 << 30


def write(root: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def meminfo(total: int, available: int, swap: int = 0, swap_free: int = 0) -> Mapping[str, str]:
    words = {"MemTotal": total, "MemFree": 1, "MemAvailable": available}
    words |= {"SwapTotal": swap, "SwapFree": swap_free}
    return {"proc/meminfo": "".join(f"{name}: {n // 1024} kB\n" for name, n in words.items())}


def stalls(file: str, full_microseconds: int) -> Mapping[str, str]:
    tail = "avg10=0.00 avg60=0.00 avg300=0.00 total="
    return {file: f"some {tail}{2 * full_microseconds}\nfull {tail}{full_microseconds}\n"}


def group_v2(path: str, limit: str, used: int, kills: int = 0) -> Mapping[str, str]:
    folder = f"sys/fs/cgroup{path}"
    return {
        f"{folder}/memory.max": f"{limit}\n",
        f"{folder}/memory.current": f"{used}\n",
        f"{folder}/memory.stat": f"anon 290\nactive_file {GIB // 8}\ninactive_file {GIB // 8}\n",
        f"{folder}/memory.events": f"low 0\nhigh 4\nmax 9\noom 2\noom_kill {kills}\n",
    }


class Clock:
    seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def linux(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> PressureSources:
    monkeypatch.setattr(sys, "platform", "linux")
    return PressureSources(tmp_path, clock=clock)


def shares(sources: PressureSources) -> dict[PressureSource, float]:
    return {each.source: each.share for each in sources.read()}


def test_memory_and_swap_of_the_machine_count_together(
    linux: PressureSources, tmp_path: Path
) -> None:
    write(tmp_path, meminfo(8 * GIB, 2 * GIB, 2 * GIB, GIB))
    (found,) = linux.read()
    assert found.source is PressureSource.MACHINE
    assert found.share == pytest.approx(0.7)
    assert found.words == "7.0 GiB of 10.0 GiB (70%) of the machine's memory and swap are in use"


def test_stalls_are_a_share_of_the_time_since_the_last_reading(
    linux: PressureSources, tmp_path: Path, clock: Clock
) -> None:
    write(tmp_path, {"proc/self/cgroup": "0::/ours\n"})
    for at, of_machine, of_group in ((0, 1_000_000, 0), (2, 1_500_000, 2_000_000), (3, 1, 9**9)):
        clock.seconds = 100 + at
        write(tmp_path, stalls("proc/pressure/memory", of_machine))
        write(tmp_path, stalls("sys/fs/cgroup/ours/memory.pressure", of_group))
        found = shares(linux)
        expected = {0: {}, 2: (0.25, 1.0), 3: (0.0, 1.0)}[at]
        assert tuple(found.values()) == tuple(expected)
        assert set(found) <= {PressureSource.STALLS, PressureSource.GROUP_STALLS}


def test_the_group_with_least_left_counts_without_its_cached_files(
    linux: PressureSources, tmp_path: Path
) -> None:
    write(tmp_path, meminfo(64 * GIB, 60 * GIB))
    write(tmp_path, {"proc/self/cgroup": "0::/user.slice/ours\n"})
    write(tmp_path, group_v2("/user.slice/ours", str(4 * GIB), 2 * GIB))
    write(tmp_path, group_v2("/user.slice", str(10 * GIB), 9 * GIB))
    write(tmp_path, group_v2("", "max", 9 * GIB))
    found = {each.source: each for each in linux.read()}
    assert found[PressureSource.GROUP].share == pytest.approx(8.75 / 10)
    assert "8.8 GiB of 10.0 GiB (88%) of the control group /user.slice" in (
        found[PressureSource.GROUP].words
    )


def test_a_process_that_the_kernel_has_ended_is_said_once(
    linux: PressureSources, tmp_path: Path
) -> None:
    write(tmp_path, meminfo(64 * GIB, 60 * GIB))
    write(tmp_path, {"proc/self/cgroup": "0::/ours\n"})
    said = []
    for kills in (3, 3, 4, 4):
        write(tmp_path, group_v2("/ours", str(4 * GIB), GIB, kills))
        said.append(shares(linux).get(PressureSource.KILLS))
    assert said == [None, 0.0, 1.0, 0.0]


def test_the_first_version_of_groups_is_read_as_well(
    linux: PressureSources, tmp_path: Path
) -> None:
    group = "sys/fs/cgroup/memory/docker/1"
    files = {
        "proc/self/cgroup": "5:cpu:/docker/1\n4:memory:/docker/1\n0::/\n",
        f"{group}/memory.limit_in_bytes": f"{4 * GIB}\n",
        f"{group}/memory.usage_in_bytes": f"{3 * GIB}\n",
        f"{group}/memory.stat": f"total_inactive_file {GIB}\ntotal_active_file 0\n",
        f"{group}/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 0\n",
    }
    write(tmp_path, {**meminfo(64 * GIB, 60 * GIB), **files})
    linux.read()
    write(tmp_path, {f"{group}/memory.oom_control": "under_oom 1\noom_kill 1\n"})
    found = shares(linux)
    assert found[PressureSource.GROUP] == pytest.approx(0.5)
    assert found[PressureSource.KILLS] == 1.0


@given(
    st.dictionaries(
        st.sampled_from(
            [
                *("proc/meminfo", "proc/self/cgroup", "proc/pressure/memory"),
                *(f"sys/fs/cgroup/{name}" for name in ("memory.max", "memory.stat")),
                *(f"sys/fs/cgroup/{name}" for name in ("memory.current", "memory.events")),
            ]
        ),
        st.one_of(
            st.sampled_from(["", "max\n", "0::/\n", "oom_kill\n", "full avg10=0 total=x\n", "7\n"]),
            st.text(st.characters(codec="ascii"), max_size=40),
        ),
    )
)
def test_files_of_any_content_are_read_without_an_error(
    tmp_path_factory: pytest.TempPathFactory, files: Mapping[str, str]
) -> None:
    root = tmp_path_factory.mktemp("root")
    write(root, files)
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(sys, "platform", "linux")
        sources = PressureSources(root)
        for _ in range(2):
            assert all(isinstance(each, Reading) for each in sources.read())


class MacLibrary:
    """libSystem, with a level of pressure and a footprint; None: a call that fails."""

    def __init__(self, level: int | None, footprint_bytes: int | None) -> None:
        self.level = level
        self.footprint_bytes = footprint_bytes

    def sysctlbyname(self, name: bytes, value: Any, size: Any, new: None, length: Any) -> int:
        assert name == b"kern.memorystatus_vm_pressure_level"
        assert new is None
        if self.level is None:
            return -1
        value._obj.value = self.level
        return 0

    def proc_pid_rusage(self, pid: int, flavor: int, usage: Any) -> int:
        assert pid == os.getpid()
        if self.footprint_bytes is None:
            return -1
        ctypes.cast(usage, ctypes.POINTER(ctypes.c_uint64))[9] = self.footprint_bytes
        return 0


@pytest.mark.parametrize(
    ("level", "share", "name"), [(1, 0.0, "normal"), (2, 0.5, "warning"), (4, 1.0, "critical")]
)
def test_macos_says_its_level_and_how_large_the_daemon_is(
    monkeypatch: pytest.MonkeyPatch, level: int, share: float, name: str
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    total = psutil.virtual_memory().total
    sources = PressureSources(open_library=lambda: MacLibrary(level, total // 8))
    system, own = sources.read(total // 4)
    assert (system.source, system.share) == (PressureSource.SYSTEM, share)
    assert name in system.words
    assert own.source is PressureSource.FOOTPRINT
    assert own.share == pytest.approx(3 / 8, rel=1e-3)


def test_calls_of_macos_that_fail_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert PressureSources(open_library=lambda: MacLibrary(None, None)).read() == ()
    assert PressureSources(open_library=lambda: MacLibrary(3, None)).read() == ()
    assert PressureSources(open_library=object).read() == ()


def test_this_machine_says_something() -> None:
    sources = open_sources()
    assert sources is not None
    for each in sources.read():
        assert 0 <= each.share <= 1
        assert each.words
    assert footprint.footprint_bytes(os.getpid()) is None or sys.platform == "darwin"
