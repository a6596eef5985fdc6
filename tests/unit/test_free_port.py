"""The port that `make serve` tries before it installs anything."""

import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from server.settings import Settings
from tools.free_port import DEFAULT_PORT, asked_port, is_taken

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
