"""Helper processes of the server, which imports no MLX. Each answers one question and ends.

    python -m engine.mlx_backend.helper SOCKET memory [CONFIG STORAGE_BYTES]
    python -m engine.mlx_backend.helper SOCKET fetch REPOSITORY

`memory` answers how many bytes MLX finds free, or what memory the model of CONFIG takes, which must
have been fetched. Its KV cache and states take STORAGE_BYTES unless CONFIG specifies them.
`memory_bytes` of CONFIG is the most that the model may take.

`fetch` downloads a repository from Hugging Face, and reports its progress.
"""

import os
import signal
import socket
import sys
from threading import Lock, Thread
from typing import TypeAlias

from pydantic import TypeAdapter

from engine.api import ModelError, one_line
from engine.mlx_backend.environment import mlx_imports
from engine.mlx_backend.loading.locate import fetch_checkpoint
from engine.process.sockets import send_all
from engine.values.settings import EngineConfig
from engine.values.stats import ModelMemory

CONFIG = TypeAdapter(EngineConfig)

Answer: TypeAlias = tuple[int, int] | int | ModelMemory | str | None

ANSWER: TypeAdapter[Answer] = TypeAdapter(Answer)
"""One line that a helper sends. A pair is progress: the bytes that have been fetched, and all that
there will be. The last line is the memory, None for a repository that has been fetched, or an
error's message.
"""


def main(descriptor: int, question: str, *arguments: str) -> None:
    connection, lock = socket.socket(fileno=descriptor), Lock()
    Thread(target=_exit_when_closed, args=[connection], daemon=True).start()

    def send(answer: Answer) -> None:
        with lock:  # a download has several threads
            send_all(connection, ANSWER.dump_json(answer) + b"\n")

    answer: Answer = None
    try:
        if question == "memory":
            answer = _memory(*arguments)
        else:
            fetch_checkpoint(arguments[0], lambda done, total: send((done, total)))
    except ModelError as error:
        answer = str(error)
    except Exception as error:  # unreadable files
        answer = one_line(error)
    send(answer)


def _memory(*needed: str) -> int | ModelMemory:
    """The answer to `memory`. Raises ModelError."""
    with mlx_imports():
        from engine.mlx_backend import assembly, host  # noqa: PLC0415 - MLX comes after the BLAS

    if not needed:
        return host.examine().left_bytes
    config, storage_bytes = needed
    return assembly.needed_memory(CONFIG.validate_json(config), int(storage_bytes))


def _exit_when_closed(connection: socket.socket) -> None:
    """End this process when the server closes the socket, or ends. Its group has a pip that it may
    have started.
    """
    connection.recv(1)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
