"""The daemon in which something hangs for good: `python -m tests.restart.hung_daemon WHAT` and the
flags of `serve`. It says so on standard error when it does.
"""

import sys
import threading
from functools import partial
from typing import Any, NoReturn
from unittest import mock

from engine.process.child import start_child
from server.terminal.cli import app

HANGING = {
    "step": "engine.mlx_backend.runner.MlxRunner.submit",
    "worker": "server.generation.requests._checked_requests",
    "writer": "kvstore.disk.space.Space.create",
}
"""What is called in its place does not come back, in the server or in the engine's process."""

SAYS = "hangs for good"


def hang(*_: object) -> NoReturn:
    print(SAYS, file=sys.stderr, flush=True)
    while True:
        threading.Event().wait()


def start_hung_engine(what: str, module: str) -> object:
    """In place of the engine's own module."""
    return start_child("tests.restart.hung_engine", what)


def main() -> None:
    what = sys.argv.pop(1)
    place = HANGING[what]
    patch: Any = mock.patch(place, hang)
    if not place.startswith("server."):
        patch = mock.patch("engine.launch.start_child", partial(start_hung_engine, what))
    with patch:
        app(["serve", *sys.argv[1:]])


if __name__ == "__main__":
    main()
