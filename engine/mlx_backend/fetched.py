"""A process that fetches a repository from Hugging Face, and ends when its socket does.

    python -m engine.mlx_backend.fetched SOCKET REPOSITORY

It sends reports of `engine.child_process`, one a line.
"""

import os
import socket
import sys
from threading import Lock, Thread

from engine.api import ModelError
from engine.child_process import REPORT, FetchReport
from engine.mlx_backend.errors import one_line
from engine.mlx_backend.loading.source import fetch_checkpoint
from engine.sockets import send_all


def main(descriptor: int, repository: str) -> None:
    connection, lock = socket.socket(fileno=descriptor), Lock()
    Thread(target=_end_with, args=[connection], daemon=True).start()

    def send(report: FetchReport) -> None:
        with lock:  # a download has several threads
            send_all(connection, REPORT.dump_json(report) + b"\n")

    error = ""
    try:
        fetch_checkpoint(repository, lambda done, total: send(FetchReport(done, total)))
    except ModelError as failure:
        error = str(failure)
    except Exception as failure:  # of files that nobody can read
        error = one_line(failure)
    send(FetchReport(has_ended=True, error=error))


def _end_with(connection: socket.socket) -> None:
    """End this process when the daemon closes the socket, or ends itself."""
    connection.recv(1)
    os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
