"""A coding agent's program, started by `rootstock launch` in a home of its own: without settings,
sessions or an account of the user's.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
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
    of it go elsewhere. It works in a folder of its home.
    """

    name: str
    environment: str
    home: Path
    daemon: Daemon
    variables: Mapping[str, str] = field(default_factory=dict)
    folder: str = "."

    def run(self, *arguments: str) -> list[Any]:
        """The lines of its report, each an object. Its exit status is in the report too."""
        output, errors = self.say(*arguments)
        lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        assert lines, errors
        return lines

    def say(self, *arguments: str) -> tuple[str, str]:
        """What it writes, and what it writes of errors."""
        program = self._start(*arguments)
        try:
            return program.communicate(timeout=SECONDS)
        finally:
            _kill(program)

    def in_two_folders(self) -> tuple["Agent", "Agent"]:
        """At work in two projects of the same user."""
        return replace(self, folder="alpha"), replace(self, folder="beta-project")

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
        workplace = self.home / self.folder
        workplace.mkdir(exist_ok=True)
        kept = {name: os.environ[name] for name in KEPT if name in os.environ}
        return subprocess.Popen(
            [sys.executable, "-m", "server", "launch", self.name, *there, "--", *arguments],
            cwd=workplace,
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


def shared(cached: int, asked: int, least: float) -> str:
    """Of a first request, how much sessions in other folders had left behind, and at least that
    share. The scripted model's tokens are bytes.
    """
    assert least * asked <= cached < asked, (cached, asked)
    return f"{cached} of {asked} tokens cached ({cached / asked:.0%})"


def _kill(program: "subprocess.Popen[str]") -> None:
    try:
        os.killpg(program.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    program.wait()
