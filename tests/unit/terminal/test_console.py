"""The command's name as it can be typed, and what a signal leaves of a terminal."""

import os
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.terminal.console import command_name, terminal_restored, typeable


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


@pytest.fixture
def terminal() -> Iterator[int]:
    screen, terminal = os.openpty()
    yield terminal
    os.close(screen)
    os.close(terminal)


def ended_by_a_signal(terminal: int) -> None:
    """As where SystemExit comes before the prompt has noted what it changes."""
    with terminal_restored(terminal):
        changed = termios.tcgetattr(terminal)
        changed[3] &= ~termios.ECHO
        termios.tcsetattr(terminal, termios.TCSANOW, changed)
        raise SystemExit(143)


def test_a_terminal_that_a_signal_finds_half_changed_is_put_back(terminal: int) -> None:
    with pytest.raises(SystemExit):
        ended_by_a_signal(terminal)
    assert termios.tcgetattr(terminal)[3] & termios.ECHO
