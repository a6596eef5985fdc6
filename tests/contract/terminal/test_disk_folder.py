"""`rootstock cache du`, `verify` and `clear` of a directory that a tier has written."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.disk.store import DiskStore
from tests.contract.terminal.commands import run
from tests.disk_store_harness import LIMITS, Chain, allocated, extent_files, flip, stored

N_ENTRIES, ENTRY_BYTES = 30, 40_960


@pytest.fixture
def open_tier(tmp_path: Path) -> Iterator[DiskStore]:
    tier = DiskStore.open(tmp_path, "fp_one, [red]", LIMITS, model="org/[bold]")
    stored(tier, Chain("one", N_ENTRIES).extent())
    yield tier
    tier.close()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Of a daemon that has stopped."""
    for fingerprint, model in (("fp_one", "models/tiny"), ("fp_two", "")):
        tier = DiskStore.open(tmp_path, fingerprint, LIMITS, model=model)
        stored(tier, Chain("one", N_ENTRIES).extent())
        tier.close()
    return tmp_path


def test_du_has_a_line_for_each_model(directory: Path) -> None:
    result = run("cache", "du", directory)
    assert result.exit_code == 0
    head, *lines, total = result.stdout.splitlines()
    assert head.split() == ["model", "files", "size", "folder"]
    assert [line.split("  ")[0] for line in lines] == ["models/tiny", "a model without a name"]
    assert {line.split()[-4] for line in lines} == {"2"}
    assert all(line.split()[-1].startswith("v4-") for line in lines)
    assert total.endswith(" MiB in all")
    least = 2 * N_ENTRIES * ENTRY_BYTES / 2**20
    assert least < float(total.split()[0]) <= allocated(directory) / 2**20 + 0.01


def test_du_while_a_daemon_runs(tmp_path: Path, open_tier: DiskStore) -> None:
    shown = run("cache", "du", tmp_path).stdout
    assert "org/[bold]" in shown
    assert "fp_one, [red]" not in shown
    assert "fp_one, [red]" in run("cache", "du", tmp_path, "--verbose").stdout


def test_what_is_sound(directory: Path) -> None:
    result = run("cache", "verify", directory)
    assert result.exit_code == 0
    assert result.stdout.startswith("models/tiny (v4-")
    found = [line.partition(": ")[2] for line in result.stdout.splitlines()]
    assert found == ["30 entries, 1.17 MiB, sound"] * 2


def test_a_flipped_bit_is_found_and_is_there_afterwards(directory: Path) -> None:
    flip(extent_files(directory)[0], 5 * ENTRY_BYTES + 7)
    for _ in range(2):
        result = run("cache", "verify", directory)
        assert result.exit_code == 1
        assert "30 entries, 1.17 MiB, 1 damaged\n" in result.stdout
        assert result.stdout.count("sound") == 1


def test_clear_removes_what_is_stored_and_nothing_else(directory: Path) -> None:
    others = [directory / name for name in ("v5-website", "v4-abc", "notes")]
    for other in others:
        other.mkdir()
        (other / "file").write_text("mine")
    result = run("cache", "clear", directory)
    assert result.exit_code == 0
    assert result.stdout.endswith(" MiB freed\n")
    assert not extent_files(directory)
    assert [(other / "file").read_text() for other in others] == ["mine"] * 3
    assert run("cache", "du", directory).stdout == "0 bytes in all\n"


@pytest.mark.parametrize("command", ["verify", "clear"])
def test_a_daemon_that_runs_is_left_alone(
    tmp_path: Path, open_tier: DiskStore, command: str
) -> None:
    result = run("cache", command, tmp_path)
    assert result.exit_code == 1
    assert f"error: the disk cache {tmp_path} is in use by another daemon (pid " in result.stderr
    assert open_tier.known(Chain("one", N_ENTRIES).names) == N_ENTRIES


@pytest.mark.parametrize("command", ["du", "verify", "clear"])
def test_a_directory_that_is_no_disk_cache_is_left_as_it_is(tmp_path: Path, command: str) -> None:
    (tmp_path / "v1-notes").mkdir()
    for directory in (tmp_path, tmp_path / "nothing"):
        result = run("cache", command, directory)
        assert result.exit_code == 1
        assert result.stderr == f"error: there is no disk cache in {directory}\n"
    assert [path.name for path in tmp_path.iterdir()] == ["v1-notes"]


def test_a_directory_and_a_daemon_are_not_cleared_at_once(directory: Path) -> None:
    for flags in (["--tiers", "disk"], ["--what", "kv"], ["--url", "http://127.0.0.1:1/v1"]):
        result = run("cache", "clear", directory, *flags)
        assert result.exit_code == 2
        assert f"{flags[0]}: a directory has no daemon" in result.stderr
    assert extent_files(directory)
