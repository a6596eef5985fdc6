"""Coding agents, started by `rootstock launch` in a home of their own: without settings, sessions
or an account of the user's. What every one of them is put through.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.clients.catalogue import ENVIRONMENTS, ROOT
from tests.clients.checks import Check, Daemon, Scripted, main, stopped
from tests.clients.scenario import (
    ENDLESS,
    FAREWELL,
    GREETING,
    QUESTION,
    knows_the_weather,
)

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


class Program(ABC):
    """One agent's flags, and where its report has the answer and the tokens."""

    name: str
    """As `rootstock launch` knows it."""

    environment: str
    """Where `make clients` installs it."""

    variables: Mapping[str, str] = {}
    """Keep it from requests to others than the daemon."""

    ask: tuple[str, ...]
    """Before a question."""

    resume: tuple[str, ...]
    """Before a question of the session that was the last."""

    least_resumed, least_elsewhere = 0.95, 0.9
    """The share of a prompt that is cached, of a session that goes on and in another folder."""

    def main(self, *more: Check) -> None:
        """Run the program's checks and `more`, all of which need the scripted model."""
        main({}, *map(Scripted, (*self.checks(), *more)))

    def checks(self) -> tuple[Check, ...]:
        """Those of this class that the program can pass."""
        return self.conversation, self.tool_loop, self.two_folders, self.cancellation

    @abstractmethod
    def text(self, report: Any) -> str:
        """The answer in the report of a session."""

    @abstractmethod
    def usage(self, report: Any) -> tuple[int, int]:
        """Of the last request: its tokens that were cached, and all."""

    def check_call(self, report: Any) -> None:
        """The tool was called once, and its program ended well: where the report says so. Else the
        report must have an answer.
        """
        assert self.text(report), report

    def run(self, agent: Agent, *arguments: str) -> Any:
        """Its report."""
        return agent.run(*arguments)

    def agent_in(self, home: str, daemon: Daemon) -> Agent:
        return Agent(self.name, self.environment, Path(home), daemon, self.variables)

    def once(self, daemon: Daemon, *arguments: str) -> Any:
        """The report of one session in a home of its own."""
        with tempfile.TemporaryDirectory() as home:
            return self.run(self.agent_in(home, daemon), *arguments)

    def conversation(self, daemon: Daemon) -> str:
        """The second turn is a process of its own, which resumes the first."""
        with tempfile.TemporaryDirectory() as home:
            agent = self.agent_in(home, daemon)
            first = self.text(self.run(agent, *self.ask, GREETING))
            resumed = self.run(agent, *self.resume, FAREWELL)
        assert first
        return f"{first} ({shared(*self.usage(resumed), self.least_resumed)})"

    def tool_loop(self, daemon: Daemon) -> str:
        report = self.once(daemon, *self.ask, QUESTION)
        self.check_call(report)
        answer = knows_the_weather(self.text(report))
        return f"{answer} ({shared(*self.usage(report), self.least_resumed)})"

    def two_folders(self, daemon: Daemon) -> str:
        with tempfile.TemporaryDirectory() as home:
            for agent in self.agent_in(home, daemon).in_two_folders():
                report = self.run(agent, *self.ask, GREETING)
        return shared(*self.usage(report), self.least_elsewhere)

    def cancellation(self, daemon: Daemon) -> str:
        with tempfile.TemporaryDirectory() as home:
            return self.agent_in(home, daemon).cancel(*self.ask)


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
