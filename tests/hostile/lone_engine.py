"""The process of an engine that starts no other: `python -m tests.hostile.lone_engine SOCKET`."""

import sys
from typing import NoReturn
from unittest import mock

from engine.build import load
from engine.remote.host import main


def refuse(*_: object, **__: object) -> NoReturn:
    raise OSError("Resource temporarily unavailable")


if __name__ == "__main__":
    with mock.patch("engine.grammar.process.start_child", refuse):
        main(int(sys.argv[1]), load)
