"""A coding agent's program, started by `rootstock launch` in a home of its own: without settings,
sessions or an account of the user's.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.clients.catalogue import ENVIRONMENTS, ROOT
from tests.clients.checks import Daemon, stopped
from tests.clients.scenario import ENDLESS

SECONDS = 240
KEPT = ("TMPDIR", "LANG")


@dataclass(frozen=True)
class Agent:
    """`environment` is where its program is installed, `variables` are those that make no request
    of it go elsewhere. `home` is its home and its workplace.
    """

    name: str
    environment: str
    home: Path
    daemon: Daemon
    variables: Mapping[str, str] = field(default_factory=dict)

    def run(self, *arguments: str) -> list[Any]:
        """The lines of its report, each an object. Its exit status is in the report too."""
        program = self._start(*arguments)
        try:
            output, errors = program.communicate(timeout=SECONDS)
        finally:
            _kill(program)
        lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        assert lines, errors
        return lines

    def cancel(self, *arguments: str) -> str:
        """Kill it in the middle of an answer without an end."""
        program = self._start(*arguments, ENDLESS)
        try:
            return stopped(self.daemon, lambda: _kill(program))
        finally:
            _kill(program)

    def _start(self, *arguments: str) -> "subprocess.Popen[str]":
        there = ("--url", self.daemon.base_url, "--model", self.daemon.model)
        programs = ENVIRONMENTS / self.environment / "node_modules/.bin"
        kept = {name: os.environ[name] for name in KEPT if name in os.environ}
        return subprocess.Popen(
            [sys.executable, "-m", "server", "launch", self.name, *there, "--", *arguments],
            cwd=self.home,
            env={
                **kept,
                **self.variables,
                "HOME": str(self.home),
                "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
                "PYTHONPATH": str(ROOT),
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # its children die with it
        )


def _kill(program: "subprocess.Popen[str]") -> None:
    try:
        os.killpg(program.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    program.wait()
