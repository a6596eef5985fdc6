"""The daemon that can start no other process: `python -m tests.hostile.lone_daemon` and the flags
of `serve`.
"""

import sys
from typing import NoReturn
from unittest import mock

from server.cli import app


def refuse(*_: object, **__: object) -> NoReturn:
    raise OSError("Resource temporarily unavailable")


def main() -> None:
    with mock.patch("engine.constraints.remote.process.subprocess.Popen", refuse):
        app(["serve", *sys.argv[1:]])


if __name__ == "__main__":
    main()
