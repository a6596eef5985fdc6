"""Processes of our own modules: how they start and end."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from engine.process.sockets import socket_pair

ROOT = Path(__file__).parents[2]
"""The folder of the package `engine`: in a clone, or inside the installed wheel."""


REPORTED_STATUS = 75
"""The exit status of an engine's process that has reported why it ends, in its last line."""


class ChildProcess(Protocol):
    """The part of `subprocess.Popen` that the owner of a process uses."""

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, negative for the signal that has ended it. Raises TimeoutExpired."""
        ...

    def kill(self) -> None: ...


def ending(code: int) -> str:
    """Describe a process's exit code in words."""
    return signal.Signals(-code).name if code < 0 else f"exit status {code}"


def start_child(
    module: str,
    *arguments: str,
    descriptors: Sequence[int] = (),
    errors: int | None = None,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Run `module` in a child process. Its arguments are the descriptor of its socket, the
    `descriptors` that it inherits in addition, and `arguments`.

    It has this process's environment, with `variables` set. Its standard error is `errors`, or
    this process's own. Ctrl-C reaches this process alone. The child stays in the same session:
    Linux gives each session the same part of a busy machine.

    Raises OSError where no process can be started.
    """
    ours, theirs = socket_pair()
    inherited = theirs.fileno(), *descriptors
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    try:
        with theirs:
            process = subprocess.Popen(
                # -P: nothing is imported from the current directory, which is the user's
                [sys.executable, "-P", "-m", module, *map(str, inherited), *arguments],
                pass_fds=inherited,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env={**os.environ, **variables, "PYTHONPATH": path},
                process_group=0,
            )
    except OSError:
        ours.close()
        raise
    return ours, process
