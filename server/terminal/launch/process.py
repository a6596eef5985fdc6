"""Starts an agent, or prints the shell commands that would."""

import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from server.terminal.errors import TerminalError
from server.terminal.launch.agent import Agent, Setup

HELP_SECONDS = 20


def become(agent: Agent, setup: Setup, arguments: Sequence[str]) -> None:
    """Replace this process by the agent, which so has the terminal to itself. It does not return.

    Raises TerminalError when the agent is not installed, or its files cannot be written.
    """
    path = shutil.which(agent.command)
    if path is None:
        raise TerminalError(f"there is no {agent.command} on the PATH; {agent.origin}")
    _write(setup.files)
    os.execve(path, _command(agent, setup, arguments), _environment(setup))


def script(agent: Agent, setup: Setup, arguments: Sequence[str]) -> str:
    """The same for a POSIX shell, a line each: what is written, unset and set, and the command."""
    files = [
        f"(umask 077; mkdir -p {shlex.quote(str(path.parent))} && "
        f"printf %s {shlex.quote(text)} > {shlex.quote(str(path))})"
        for path, text in setup.files.items()
    ]
    variables = [
        f"unset {name}" if value is None else f"export {name}={shlex.quote(value)}"
        for name, value in setup.variables.items()
    ]
    return "\n".join([*files, *variables, shlex.join(_command(agent, setup, arguments))])


def _command(agent: Agent, setup: Setup, arguments: Sequence[str]) -> list[str]:
    theirs = arguments or agent.usual_arguments
    return [agent.command, *setup.arguments, *_known_flags(agent, setup), *theirs]


def _known_flags(agent: Agent, setup: Setup) -> list[str]:
    """Those of the newer flags that the installed version has; a flag that it has not ends it."""
    path = shutil.which(agent.command)
    if path is None or not setup.newer_flags:
        return []
    try:
        asked = subprocess.run(
            [path, "--help"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            text=True,
            errors="replace",
            timeout=HELP_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    known = asked.stdout.split()
    return [flag for flag in setup.newer_flags if flag in known]


def _write(files: Mapping[Path, str]) -> None:
    """Each for its owner alone: there are keys in them."""
    try:
        for path, text in files.items():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.touch(mode=0o600)
            path.write_text(text)
    except OSError as error:
        raise TerminalError(f"{error.filename}: {error.strerror}") from error


def _environment(setup: Setup) -> dict[str, str]:
    variables = {**os.environ, **setup.variables}
    return {name: value for name, value in variables.items() if value is not None}
