"""A daemon of a chat's own: a subprocess that ends with the chat."""

import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from server.settings import ENVIRONMENT_PREFIX
from server.terminal.client import Endpoint
from server.terminal.console import TerminalError

ROOT = Path(__file__).parents[2]
READY = re.compile(r"ready on (http://\S+)\n")
POLL_SECONDS = 0.1
STOP_SECONDS = 10.0  # in addition to the time for writing to a disk cache
LAST_LINES = 10
CLEAN_ENDS = {0, -signal.SIGTERM}
HEAD = re.compile(r"^\S+ \S+ [A-Z]+ +[\w.]+: ", re.MULTILINE)
"""Time, level and logger, which are before the message in each line of the log."""


def serve_command(model: str | None) -> list[str]:
    """The command that serves the model, or that of the settings, on a free loopback port."""
    command = [sys.executable, "-P", "-m", "server", "serve"]  # -P: not the user's own `server`
    command += ["--host", "127.0.0.1", "--port", "0"]
    command += ["--log-level", "info"]  # says where it listens
    return command if model is None else [*command, "--model", model]


@contextmanager
def local_daemon(
    command: Sequence[str], progress: Callable[[str], None], stop_seconds: float = STOP_SECONDS
) -> Iterator[Endpoint]:
    """Run a daemon until the context ends. Its API key is random, and other commands do not find
    its record, so it is private.

    `progress` is called with the log's last line while the daemon starts. Raises TerminalError with
    the log's end when the daemon does not start, when it has died in the meantime, and when it was
    killed because it had not ended `stop_seconds` after SIGTERM.
    """
    api_key = secrets.token_urlsafe()
    with TemporaryDirectory(prefix="rootstock-chat-") as directory:
        log, variables = Path(directory) / "daemon.log", _variables(api_key, directory)
        with log.open("wb") as output, _started(command, output.fileno(), variables) as process:
            try:
                yield Endpoint(_ready_url(process, log, progress), api_key)
            finally:
                _stop(process, stop_seconds)
            if process.returncode not in CLEAN_ENDS:
                raise _ended(process, log)


def _variables(api_key: str, state: str) -> dict[str, str]:
    """The key, a folder of state apart, and a path on which Python finds this package."""
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        f"{ENVIRONMENT_PREFIX}API_KEY": api_key,
        "XDG_STATE_HOME": state,
        "PYTHONPATH": os.pathsep.join(path),
    }


def _started(
    command: Sequence[str], output: int, variables: Mapping[str, str]
) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        command,
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,  # the terminal's Ctrl-C is not for the daemon
    )


def _ready_url(
    process: "subprocess.Popen[bytes]", log: Path, progress: Callable[[str], None]
) -> str:
    """The base URL in the log. Waits without a limit while the process runs: a model may have to be
    downloaded first.
    """
    while process.poll() is None:
        text = log.read_text(errors="replace")
        if match := READY.search(text):
            return match[1]
        for line in text.splitlines()[-1:]:
            progress(HEAD.sub("", line))
        time.sleep(POLL_SECONDS)
    raise _ended(process, log)


def _ended(process: "subprocess.Popen[bytes]", log: Path) -> TerminalError:
    lines = HEAD.sub("", log.read_text(errors="replace")).splitlines()[-LAST_LINES:]
    problem = f"the daemon that this chat started exited with {process.returncode}"
    return TerminalError("\n".join([problem, *lines]))


def _stop(process: "subprocess.Popen[bytes]", seconds: float) -> None:
    process.terminate()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        pass
    finally:
        process.kill()  # nothing, if it has ended
        process.wait()
