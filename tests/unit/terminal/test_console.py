"""The command's name as it can be typed where a message is read."""

import sys
from pathlib import Path

import pytest

from server.terminal.console import command_name, typeable


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment in a clone, which is the working directory, and not on the PATH."""
    clone = tmp_path / "my clone"
    commands = clone / ".venv" / "bin"
    commands.mkdir(parents=True)
    for name in ("python", "rootstock", "rootstock-serve"):
        (commands / name).touch(mode=0o755)
    monkeypatch.chdir(clone)
    monkeypatch.setattr(sys, "executable", str(commands / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    return clone


def test_in_a_clone_it_is_a_path(clone: Path) -> None:
    assert command_name() == ".venv/bin/rootstock"
    assert typeable("`rootstock ps` lists rootstock-demo") == (
        "`.venv/bin/rootstock ps` lists rootstock-demo"
    )


def test_elsewhere_it_is_the_whole_path(
    clone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(clone / ".venv/bin/python"))
    assert command_name() == "'my clone/.venv/bin/rootstock'"
    (tmp_path / "else").mkdir()
    monkeypatch.chdir(tmp_path / "else")
    assert command_name() == f"'{clone}/.venv/bin/rootstock'"


def test_where_the_shell_finds_it_it_is_its_name(
    clone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a link, as uv and pipx install it."""
    (tmp_path / "rootstock").symlink_to(clone / ".venv/bin/rootstock")
    assert command_name() == "rootstock"


def test_where_another_program_has_the_name_it_is_the_second_one(
    clone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rootstock").touch(mode=0o755)
    assert command_name() == ".venv/bin/rootstock"
    (tmp_path / "rootstock-serve").symlink_to(clone / ".venv/bin/rootstock-serve")
    assert command_name() == "rootstock-serve"


def test_where_it_is_not_installed_it_is_its_name(clone: Path) -> None:
    (clone / ".venv/bin/rootstock").unlink()
    assert command_name() == "rootstock"
