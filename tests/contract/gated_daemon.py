"""A daemon process over the fake engine, whose answers wait for a line on standard input."""

import asyncio
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import IO

from server.http.listening import listening
from server.serve import configure_logging
from server.settings import load_settings
from server.terminal.serve import serve_models
from tests.contract.daemon import Starts
from tests.contract.fake_engine import FakeEngine, Gate, Script

COMMAND = (sys.executable, "-m", "tests.contract.gated_daemon")
NO_ENVIRONMENT: Mapping[str, str] = MappingProxyType({})


@contextmanager
def daemon(
    environment: Mapping[str, str] = NO_ENVIRONMENT, /, **settings: str
) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """The process of such a daemon, and its URL."""
    with started(environment, **settings) as process:
        yield process, line_of(process.stderr, r"ready on (http://\S+)/v1")


@contextmanager
def started(
    environment: Mapping[str, str] = NO_ENVIRONMENT,
    /,
    command: Sequence[str] = COMMAND,
    **settings: str,
) -> Iterator["subprocess.Popen[str]"]:
    """The process of such a daemon that begins; killed at the end if a test left it running."""
    set_variables = {f"ROOTSTOCK_{name.upper()}": value for name, value in settings.items()}
    with subprocess.Popen(
        command,
        env={**os.environ, **environment, **set_variables},
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def line_of(lines: IO[str] | None, pattern: str) -> str:
    """The pattern's group in the first line of the log that has it."""
    assert lines is not None
    found = next(match for line in lines if (match := re.search(pattern, line)))
    return found[found.re.groups]


def rest_of_log(process: "subprocess.Popen[str]") -> str:
    assert process.stderr is not None
    return process.stderr.read()


def open_on_a_line(gate: Gate) -> None:
    sys.stdin.readline()
    gate.open()


def main() -> None:
    settings = load_settings({"port": 0})
    configure_logging(settings.log_level)
    gate = Gate()
    threading.Thread(target=open_on_a_line, args=[gate], daemon=True).start()
    engine = FakeEngine(Script(gate=gate))
    with listening(settings.host, settings.port) as sockets:
        asyncio.run(serve_models(settings, sockets, Starts(engine)))


if __name__ == "__main__":
    main()
