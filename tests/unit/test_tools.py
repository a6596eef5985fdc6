"""What make targets run: the free port, and the installation of the service."""

import os
import plistlib
import re
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from server.settings import Settings
from tools.free_port import DEFAULT_PORT, asked_port, is_taken
from tools.install_service import Manager, install, launchd, problem, systemd


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """One whose name means something to systemd, to XML and to the shell. (A quote or a dollar
    sign in it systemd takes in no command.)
    """
    path = tmp_path / "it 100%h & <mine>"
    path.mkdir()
    return path


@pytest.fixture
def command(home: Path) -> Path:
    path = home / "rootstock"
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def installed(manager: Manager, home: Path, command: Path) -> tuple[list[Sequence[str]], list[str]]:
    """The commands that were run, and what was said."""
    ran: list[Sequence[str]] = []
    said: list[str] = []
    install(manager, home, command, ran.append, said.append)
    return ran, said


def complaints(unit: Path) -> list[str]:
    """What systemd says of the unit and its command; it looks at the machine's own units, too."""
    verified = subprocess.run(
        ["systemd-analyze", "verify", "--user", "--man=no", str(unit)],
        env={**os.environ, "XDG_RUNTIME_DIR": str(unit.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    return [line for line in verified.stderr.splitlines() if "rootstock" in line]


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="there is no systemd here")
def test_systemd_finds_the_command_and_nothing_to_complain_of(home: Path, command: Path) -> None:
    ran, _ = installed(systemd(home), home, command)
    unit = home / ".config/systemd/user/rootstock.service"
    assert complaints(unit) == []
    command.unlink()
    assert any(f"Command {command} is not executable" in line for line in complaints(unit))
    assert ran[-1] == ("systemctl", "--user", "restart", "rootstock")


def test_launchd_gets_the_command_word_by_word(home: Path, command: Path) -> None:
    ran, _ = installed(launchd(home), home, command)
    agent = home / "Library/LaunchAgents/rootstock.plist"
    content = plistlib.loads(agent.read_bytes())
    config = f"{home}/.config/rootstock/rootstock.yaml"
    assert content["ProgramArguments"] == [str(command), "serve", "--config", config]
    assert content["StandardErrorPath"] == f"{home}/Library/Logs/rootstock.log"
    assert content["KeepAlive"] == {"SuccessfulExit": False}
    ((*shell, script),) = ran
    assert shell == ["sh", "-c"]
    subprocess.run(["sh", "-n", "-c", script], check=True)
    words = subprocess.run(
        ["sh", "-c", f"launchctl() {{ printf '%s\\n' \"$@\"; return 1; }}; {script}; true"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert words[-1] == str(agent)


@pytest.mark.parametrize("manager_of", [systemd, launchd])
def test_settings_are_private_and_are_kept(
    manager_of: Callable[[Path], Manager], home: Path, command: Path
) -> None:
    config = home / ".config/rootstock/rootstock.yaml"
    _, said = installed(manager_of(home), home, command)
    assert f"wrote {config}: its settings" in said
    assert stat.S_IMODE(config.stat().st_mode) == 0o600
    config.write_text("port: 8001\n")
    _, said = installed(manager_of(home), home, command)
    assert config.read_text() == "port: 8001\n"
    assert not any(line.startswith(f"wrote {config}") for line in said)


@pytest.mark.parametrize(
    ("check", "reason"),
    [
        (("no-such-program", "--user"), "there is no no-such-program here (No such file or dir"),
        (
            ("sh", "-c", "echo 'Failed to connect to bus:\n  No medium found' >&2; exit 1"),
            "no sh runs for this user (sh -c 'echo",
        ),
        (("true",), ""),
    ],
)
def test_a_manager_that_does_not_run_is_named_before_anything_is_written(
    check: tuple[str, ...], reason: str, home: Path
) -> None:
    found = problem(replace(systemd(home), check=check))
    assert found.startswith(reason)
    assert bool(found) == bool(reason)
    assert "Failed" not in reason or found.endswith("Failed to connect to bus: No medium found)")


def test_make_install_service_without_systemd_is_a_line(home: Path, tmp_path: Path) -> None:
    """With a PATH on which there is no manager at all."""
    command = [sys.executable, "-m", "tools.install_service"]
    around = {"HOME": str(home), "PATH": str(tmp_path), "PYTHONPATH": os.getcwd()}
    ended = subprocess.run(command, env=around, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr.endswith(
        "(No such file or directory), so nothing was installed. Start the daemon by a program that "
        f"runs here: {Path(sys.executable).with_name('rootstock')} serve\n"
    )
    assert [*home.iterdir()] == []


@pytest.mark.parametrize("manager_of", [systemd, launchd])
def test_it_says_what_it_does(
    manager_of: Callable[[Path], Manager], home: Path, command: Path
) -> None:
    manager = manager_of(home)
    ran, said = installed(manager, home, command)
    assert f"wrote {manager.target}" in said
    assert len([line for line in said if line.startswith("running ")]) == len(ran)
    assert not re.search("@[A-Z]+@", manager.target.read_text())


SCRIPT = Path(__file__).parents[2] / "tools" / "free_port.py"


@pytest.mark.parametrize(
    ("port", "options", "environment", "asked"),
    [
        ("", [], {}, DEFAULT_PORT),
        ("9000", ["--port", "9001"], {"ROOTSTOCK_PORT": "9002"}, 9000),
        ("", ["--model", "x", "--port", "9001"], {"ROOTSTOCK_PORT": "9002"}, 9001),
        ("", ["--port=9001"], {}, 9001),
        ("", [], {"ROOTSTOCK_PORT": "9002"}, 9002),
        ("", ["--config", "x.yaml"], {}, None),
        ("", ["--config=x.yaml"], {}, None),
        ("", [], {"ROOTSTOCK_CONFIG": "x.yaml"}, None),
        ("", ["--port", "0"], {}, None),  # any that is free
        ("", ["--port"], {}, DEFAULT_PORT),
        ("ninety", [], {}, None),  # which the daemon refuses
        ("90000", [], {}, None),
    ],
)
def test_the_port_is_the_daemons(
    port: str, options: Sequence[str], environment: Mapping[str, str], asked: int | None
) -> None:
    assert asked_port(port, options, environment) == asked


def test_the_default_is_the_daemons() -> None:
    assert Settings.model_fields["port"].default == DEFAULT_PORT


def test_a_taken_port_is_refused_with_the_command_that_works() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port: int = other.getsockname()[1]
        assert is_taken(port)
        done = subprocess.run(
            [sys.executable, "-I", str(SCRIPT), str(port)],
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr.startswith(f"Port {port} is taken, perhaps by another Rootstock.")
    command, _, free = done.stderr.strip().rpartition("=")
    assert command.endswith("make serve PORT")
    assert not is_taken(int(free))
    assert not is_taken(port)
