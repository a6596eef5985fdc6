"""Starts a module of this program in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
"""Where the package `engine` lies: in a clone, or inside of what the wheel installs."""


def start_module(module: str, *descriptors: int) -> "subprocess.Popen[bytes]":
    """With these descriptors open, and their numbers as its arguments. Raises OSError.

    Nothing is imported from the current directory (-P), which is the user's. It has no standard
    streams: a library that crashes says so at length. Ctrl-C does not reach it, though it stays in
    the session: Linux gives each the same part of a busy machine, and niceness counts within one
    alone.
    """
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *map(str, descriptors)],
        pass_fds=descriptors,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path},
        process_group=0,
    )
