"""The daemon whose engine can start no other process: `python -m tests.hostile.lone_daemon` and the
flags of `serve`. With a socket's number in their place it is that engine's process.
"""

import sys
from typing import NoReturn
from unittest import mock

from engine.build import start
from engine.process.child import start_child
from engine.remote.host import main as run_engine
from server.terminal.cli import app


def start_lone_engine(module: str) -> object:
    """In place of the engine's own module."""
    return start_child("tests.hostile.lone_daemon")


def refuse(*_: object, **__: object) -> NoReturn:
    raise OSError("Resource temporarily unavailable")


if __name__ == "__main__":
    if sys.argv[1].isdecimal():
        with mock.patch("engine.grammar.process.start_child", refuse):
            run_engine(int(sys.argv[1]), start)
    else:
        with mock.patch("engine.launch.start_child", start_lone_engine):
            app(["serve", *sys.argv[1:]])
