"""`rootstock ls`, `rm` and `pull` over a Hugging Face cache of the test's own."""

from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.contract.terminal.commands import run

Put = Callable[..., Path]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.fixture
def put(hub: Path) -> Put:
    """Lays a repository of one file into the cache, as huggingface_hub does."""

    def put(kind: str, name: str, n_bytes: int, revision: str = "a" * 40) -> Path:
        home = hub / f"{kind}s--{name.replace('/', '--')}"
        (blob := home / "blobs" / f"{revision[0]}blob").parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(bytes(n_bytes))
        (file := home / "snapshots" / revision / "config.json").parent.mkdir(parents=True)
        file.symlink_to(blob)
        return home

    return put


def test_ls_shows_models_and_nothing_else(put: Put) -> None:
    put("model", "org/small", 3 * 2**20)
    put("model", "org/[bold]", 5)
    put("dataset", "org/data", 7)
    lines = run("ls").stdout.splitlines()
    assert lines[0].split() == ["model", "size", "last", "used"]
    assert sorted(line.split()[:3] for line in lines[1:]) == [
        ["org/[bold]", "5", "bytes"],
        ["org/small", "3.00", "MiB"],
    ]


def test_ls_of_a_machine_that_has_fetched_nothing(hub: Path) -> None:
    result = run("ls")
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == f"no models in {hub}; `rootstock pull` fetches one\n"


def test_rm_deletes_every_revision_when_it_is_told_to(put: Put) -> None:
    home = put("model", "org/small", 2**20)
    put("model", "org/small", 2**20, revision="b" * 40)
    kept = put("model", "org/copy", 1)  # of the same hash, as a repository that was duplicated
    result = run("rm", "org/small", typed="y\n")
    assert "Delete org/small (2.00 MiB)? [y/N]" in result.stdout
    assert result.stdout.endswith("2.00 MiB freed\n")
    assert not home.exists()
    assert (kept / "snapshots" / ("a" * 40) / "config.json").exists()


def test_rm_asks_first_and_need_not(put: Put) -> None:
    homes = [put("model", name, 1) for name in ("org/small", "org/copy")]
    for typed in ("n\n", "\n", ""):
        assert run("rm", "org/small", typed=typed).exit_code == 1
        assert homes[0].exists()
    assert run("rm", "org/small", "org/copy", "--yes").stdout == "2 bytes freed\n"
    assert not any(home.exists() for home in homes)


def test_rm_of_what_is_not_there_deletes_nothing(put: Put) -> None:
    home = put("model", "org/small", 1)
    data = put("dataset", "org/data", 1)
    result = run("rm", "--yes", "org/small", "org/data", "org/none")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: org/data, org/none: not in the Hugging Face cache")
    assert home.exists()
    assert data.exists()


def test_pull_says_why_there_is_no_model(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    result = run("pull", "org/small")
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: cannot fetch org/small: there is no directory ")
    assert line.endswith("huggingface.co cannot be reached (HF_HUB_OFFLINE is set)")
