"""Commands of `rootstock`: in this process, and in a terminal of their own."""

import os
import pty
import select
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from typer.testing import CliRunner, Result

from server.terminal.cli import app
from tests.polling import WAIT_SECONDS

ANSWER = "Hello, wörld!"
"""What the fake engine says."""

"""A test that fails takes so long. None that passes does, on however busy a machine."""

SIZE = (40, 100)  # lines and columns
ELSEWHERE = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
"""What the environment of the tests may say of a terminal, which is not this one."""


def run(*arguments: str | Path, typed: str | bytes = "", **variables: str) -> Result:
    """A command in this process, with lines that are long enough for all that it shows."""
    variables = {"COLUMNS": "200", **variables}
    return CliRunner().invoke(app, [*map(str, arguments)], input=typed, env=variables)


@contextmanager
def terminal(state: Path, *arguments: str) -> Iterator[tuple["subprocess.Popen[bytes]", int]]:
    """The command's process, and the terminal's other end. Nobody there answers when it is asked
    where the cursor is. It is as large wherever the tests run.
    """
    ours, theirs = pty.openpty()
    try:
        termios.tcsetwinsize(theirs, SIZE)
        around = {name: value for name, value in os.environ.items() if name not in ELSEWHERE}
        with subprocess.Popen(
            [sys.executable, "-m", "server", *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={
                **around,
                "TERM": "xterm",
                "PROMPT_TOOLKIT_NO_CPR": "1",
                "XDG_STATE_HOME": str(state),
            },
            process_group=0,  # which Ctrl-Z stops, and not that of the tests
        ) as process:
            try:
                yield process, ours
            finally:
                process.kill()
    finally:
        os.close(theirs)
        os.close(ours)


def read_until(terminal: int, awaited: bytes) -> bytes:
    """What the terminal shows up to the awaited bytes, and nothing of what is behind them: how many
    come at a time is the kernel's to choose.
    """
    shown = b""
    deadline = time.monotonic() + WAIT_SECONDS
    while not shown.endswith(awaited):
        left = max(0, deadline - time.monotonic())
        assert select.select([terminal], [], [], left)[0], shown
        shown += os.read(terminal, 1)
    return shown
