"""aider: its edits are text, over chat."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.clients.checks import Daemon, Scripted, main, stopped
from tests.clients.scenario import (
    ENDLESS,
    FAREWELL,
    FORECAST,
    GREETING,
    QUESTION,
    UNKNOWN,
    UNKNOWN_FORECAST,
)

SECONDS = 120
FLAGS = (
    *("--no-git", "--yes-always", "--no-check-update", "--no-show-release-notes"),
    *("--no-show-model-warnings", "--analytics-disable", "--no-pretty", "--no-detect-urls"),
    *("--edit-format", "diff", "--map-tokens", "0"),
)


@Scripted
def conversation(daemon: Daemon) -> str:
    """The second turn is a process of its own, which restores the first."""
    with _home() as home:
        first = _run(daemon, home, GREETING)
        last = _run(daemon, home, FAREWELL, "--restore-chat-history")
    assert "I am only a script." in first, first
    assert "Tokens: " in last, last
    return last.splitlines()[-1]


@Scripted
def edit(daemon: Daemon) -> str:
    with _home() as home:
        file = home / "forecast.txt"
        file.write_text(f"{UNKNOWN_FORECAST}\n")
        output = _run(daemon, home, QUESTION, str(file))
        assert file.read_text() == f"{FORECAST}\n", output
    return FORECAST


@Scripted
def errors(daemon: Daemon) -> str:
    with _home() as home:
        output = _run(Daemon(daemon.root, UNKNOWN), home, GREETING)
    (line,) = [line for line in output.splitlines() if "NotFoundError" in line]
    assert UNKNOWN in line, line
    return line


@Scripted
def cancellation(daemon: Daemon) -> str:
    with _home() as home, _start(daemon, home, ENDLESS) as program:
        return stopped(daemon, program.kill)


@contextmanager
def _home() -> Iterator[Path]:
    """Without settings of the user's, and with a price list: else it asks the network for one."""
    with tempfile.TemporaryDirectory() as directory:
        caches = Path(directory) / ".aider/caches"
        caches.mkdir(parents=True)
        (caches / "model_prices_and_context_window.json").write_text("{}")
        yield Path(directory)


def _run(daemon: Daemon, home: Path, message: str, *options: str) -> str:
    with _start(daemon, home, message, *options) as program:
        try:
            output, _ = program.communicate(timeout=SECONDS)
        finally:
            program.kill()
    return output


def _start(daemon: Daemon, home: Path, message: str, *options: str) -> "subprocess.Popen[str]":
    model = ("--model", f"openai/{daemon.model}", "--message", message)
    address = {"OPENAI_API_BASE": daemon.base_url, "OPENAI_API_KEY": "none"}
    return subprocess.Popen(
        [sys.executable, "-m", "aider", *FLAGS, *model, *options],
        cwd=home,
        env={**os.environ, **address, "HOME": str(home), "TERM": "dumb"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


if __name__ == "__main__":
    main(globals())
