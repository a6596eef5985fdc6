"""Whatever somebody does to the files of a running tier, its process lives.

A child opens what an earlier one left that was killed, has all its files changed under it, and goes
on. It is a child because what may go wrong is a signal.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.disk.store import DiskStore
from tests.disk_store_harness import LIMITS, PATIENCE, Chain, entry, offer, read, stored

CHAINS = [Chain(f"chain {number}", 20) for number in range(4)]
MORE = Chain("more", 20)


def halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def put_a_folder_there(path: Path) -> None:
    path.unlink()
    path.mkdir()


def put_a_pipe_there(path: Path) -> None:
    """Whoever opens one waits for somebody at its other end."""
    path.unlink()
    os.mkfifo(path)


def put_nonsense_there(path: Path) -> None:
    path.write_bytes(b"nonsense" * (path.stat().st_size // 8))


CHANGES: dict[str, Callable[[Path], None]] = {
    change.__name__: change
    for change in (
        halve,
        empty,
        put_a_folder_there,
        put_a_pipe_there,
        put_nonsense_there,
        Path.unlink,
    )
}


def die_with_files_open(directory: Path) -> None:
    """The child that leaves them behind."""
    stored(DiskStore.open(directory, "model", LIMITS), *(chain.extent() for chain in CHAINS))
    os.kill(os.getpid(), signal.SIGKILL)


def see_them_change(directory: Path, change: Callable[[Path], None]) -> None:
    """The child that must live."""
    tier = DiskStore.open(directory, "model", LIMITS)
    assert read(tier, CHAINS[0].names)[1] is None
    for path in list(files_of(directory)):
        change(path)
    for _ in range(2):
        for chain in CHAINS:
            entries, _ = read(tier, chain.names)
            assert entries == [entry(name, chain.n_bytes) for name in chain.names[: len(entries)]]
        offer(tier, MORE.extent())
        tier.upkeep()
        assert tier.flush(PATIENCE)
    assert not list(tier.problems())
    tier.close()
    print("lives")


def files_of(directory: Path) -> Iterator[Path]:
    return (path for path in directory.rglob("*") if path.is_file())


def child(call: str) -> "subprocess.CompletedProcess[str]":
    program = f"from pathlib import Path; from {__name__} import *; {call}"
    command = (sys.executable, "-c", program)
    return subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=2 * PATIENCE
    )


@pytest.mark.parametrize("change", CHANGES)
def test_no_change_of_its_files_ends_the_process(tmp_path: Path, change: str) -> None:
    died = child(f"die_with_files_open(Path({str(tmp_path)!r}))")
    assert died.returncode == -signal.SIGKILL, died.stderr
    lived = child(f"see_them_change(Path({str(tmp_path)!r}), CHANGES[{change!r}])")
    assert (lived.returncode, lived.stdout) == (0, "lives\n"), lived.stderr


@pytest.mark.parametrize("name", ["9" * 20, "٤" * 8, "1"])
def test_a_file_that_is_not_named_like_an_extent_is_no_matter(tmp_path: Path, name: str) -> None:
    tier = DiskStore.open(tmp_path, "model", LIMITS)
    tier.close()
    (next(tmp_path.glob("v2-*")) / f"{name}.kv").touch()
    tier = DiskStore.open(tmp_path, "model", LIMITS)
    stored(tier, MORE.extent())
    assert read(tier, MORE.names)[1] is None
    tier.close()
