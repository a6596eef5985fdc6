"""What control groups leave of the machine's memory, from files as Linux writes them."""

from pathlib import Path

import pytest

from engine.mlx_backend.host import HostMemory, host_memory, within_cgroups

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


def test_a_machine_without_groups_is_all_ours(tmp_path: Path) -> None:
    assert within_cgroups(MACHINE, tmp_path) == MACHINE


@pytest.mark.parametrize(
    ("limit", "expected"), [("max", MACHINE), ("500", HostMemory(500, 200)), ("2000", MACHINE)]
)
def test_a_container_has_less_memory_than_its_machine(
    tmp_path: Path, limit: str, expected: HostMemory
) -> None:
    _write(tmp_path, {"proc/self/cgroup": "0::/\n", **_group_v2("", limit, 420)})
    assert within_cgroups(MACHINE, tmp_path) == expected


def test_the_limit_of_a_group_above_counts(tmp_path: Path) -> None:
    files = _group_v2("/user.slice", "500", 420) | _group_v2("/user.slice/ours", "max", 5)
    _write(tmp_path, {"proc/self/cgroup": "0::/user.slice/ours\n", **files})
    assert within_cgroups(MACHINE, tmp_path) == HostMemory(500, 200)


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
