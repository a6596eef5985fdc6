"""The daemon in which something hangs for good: `python -m tests.restart.hung_daemon WHAT` and the
flags of `serve`. It says so on standard error when it does.
"""

import sys
import threading
from typing import NoReturn
from unittest import mock

from server.cli import app

HANGING = {
    "step": "engine.mlx_backend.runner.MlxRunner.submit",
    "worker": "server.generation.completion_task._requests",
    "writer": "kvstore.tier.disk.segments.Segments.write",
}
"""What is called in its place does not come back."""

SAYS = "hangs for good"


def hang(*_: object) -> NoReturn:
    print(SAYS, file=sys.stderr, flush=True)
    while True:
        threading.Event().wait()


def main() -> None:
    what = sys.argv.pop(1)
    with mock.patch(HANGING[what], hang):
        app(["serve", *sys.argv[1:]])


if __name__ == "__main__":
    main()
