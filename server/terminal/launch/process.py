"""Starts an agent, or prints the shell commands that would."""

import os
import shlex
import shutil
from collections.abc import Sequence

from server.terminal.errors import TerminalError
from server.terminal.launch.agents import Agent, Setup


def become(agent: Agent, setup: Setup, arguments: Sequence[str]) -> None:
    """Replace this process by the agent, which so has the terminal to itself. It does not return.

    Raises TerminalError when the agent is not installed.
    """
    path = shutil.which(agent.command)
    if path is None:
        raise TerminalError(f"there is no {agent.command} on the PATH; {agent.install} brings it")
    os.execve(path, _command(agent, setup, arguments), _environment(setup))


def script(agent: Agent, setup: Setup, arguments: Sequence[str]) -> str:
    """The same for a POSIX shell, a line each: what is unset, what is set, the command."""
    lines = [
        f"unset {name}" if value is None else f"export {name}={shlex.quote(value)}"
        for name, value in setup.variables.items()
    ]
    return "\n".join([*lines, shlex.join(_command(agent, setup, arguments))])


def _command(agent: Agent, setup: Setup, arguments: Sequence[str]) -> list[str]:
    return [agent.command, *setup.arguments, *(arguments or agent.usual_arguments)]


def _environment(setup: Setup) -> dict[str, str]:
    variables = {**os.environ, **setup.variables}
    return {name: value for name, value in variables.items() if value is not None}
