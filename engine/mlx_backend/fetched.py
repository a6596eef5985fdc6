"""A process that fetches a repository from Hugging Face, and ends when its socket does.

    python -m engine.mlx_backend.fetched SOCKET REPOSITORY

It sends lines of JSON: how far it is, and last, how it ended.
"""

import os
import socket
import sys
from threading import Lock, Thread

from pydantic import TypeAdapter

from engine.api import ModelError
from engine.mlx_backend.errors import one_line
from engine.mlx_backend.loading.checkpoint import fetch_checkpoint
from engine.process.sockets import send_all

FETCHED: TypeAdapter[tuple[int, int] | str] = TypeAdapter(tuple[int, int] | str)
"""The bytes that are here and all that are known of; or, in the last line, why the repository was
not fetched, which is empty if it was.
"""


def main(descriptor: int, repository: str) -> None:
    connection, lock = socket.socket(fileno=descriptor), Lock()
    Thread(target=_end_with, args=[connection], daemon=True).start()

    def send(report: tuple[int, int] | str) -> None:
        with lock:  # a download has several threads
            send_all(connection, FETCHED.dump_json(report) + b"\n")

    error = ""
    try:
        fetch_checkpoint(repository, lambda done, total: send((done, total)))
    except ModelError as failure:
        error = str(failure)
    except Exception as failure:  # of files that nobody can read
        error = one_line(failure)
    send(error)


def _end_with(connection: socket.socket) -> None:
    """End this process when the daemon closes the socket, or ends itself."""
    connection.recv(1)
    os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
