"""A command of `rootstock` in a terminal of its own."""

import os
import pty
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

WAIT_SECONDS = 30


@contextmanager
def terminal(state: Path, *arguments: str) -> Iterator[tuple["subprocess.Popen[bytes]", int]]:
    """The command's process, and the terminal's other end. Nobody there answers when it is asked
    where the cursor is.
    """
    ours, theirs = pty.openpty()
    try:
        with subprocess.Popen(
            [sys.executable, "-m", "server", *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={
                **os.environ,
                "TERM": "xterm",
                "PROMPT_TOOLKIT_NO_CPR": "1",
                "XDG_STATE_HOME": str(state),
            },
        ) as process:
            try:
                yield process, ours
            finally:
                process.kill()
    finally:
        os.close(theirs)
        os.close(ours)


def read_until(terminal: int, awaited: bytes) -> bytes:
    """What the terminal shows, up to the awaited bytes and a little more."""
    shown = b""
    while awaited not in shown:
        assert select.select([terminal], [], [], WAIT_SECONDS)[0], shown
        shown += os.read(terminal, 1024)
    return shown
