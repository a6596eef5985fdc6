"""The daemon whose engine can start no other process: `python -m tests.hostile.lone_daemon` and the
flags of `serve`.
"""

import sys
from unittest import mock

from engine.process.child import start_child
from server.terminal.cli import app


def start_lone_engine(module: str) -> object:
    """In place of the engine's own module."""
    return start_child("tests.hostile.lone_engine")


def main() -> None:
    with mock.patch("engine.launch.start_child", start_lone_engine):
        app(["serve", *sys.argv[1:]])


if __name__ == "__main__":
    main()
