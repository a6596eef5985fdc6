"""A process that looks at memory and ends: the server imports no MLX.

    python -m engine.mlx_backend.asked SOCKET [CONFIG STORAGE_BYTES]

The answer is what MLX finds free, or what the model of CONFIG takes, whose files are here. Unless
the settings say how much its KV cache and states take, that is STORAGE_BYTES. `memory_bytes` of
CONFIG is the most that there will be.
"""

import socket
import sys

from pydantic import TypeAdapter

from engine.api import ModelError
from engine.mlx_backend.backend import keep_file_limit
from engine.mlx_backend.cpu.blas import load_blas
from engine.mlx_backend.errors import one_line
from engine.process.sockets import send_all
from engine.values.settings import EngineConfig

CONFIG = TypeAdapter(EngineConfig)
ANSWER: TypeAdapter[int | str] = TypeAdapter(int | str)
"""Bytes of memory, or why there is no answer."""


def memory_bytes(*needed: str) -> int:
    """Raises ModelError."""
    load_blas()
    with keep_file_limit():
        from engine.mlx_backend import assembly  # noqa: PLC0415 - MLX comes after the BLAS

    if not needed:
        return assembly.free_bytes()
    config, storage_bytes = needed
    return assembly.needed_bytes(CONFIG.validate_json(config), int(storage_bytes))


def main(descriptor: int, *needed: str) -> None:
    try:
        answer: int | str = memory_bytes(*needed)
    except ModelError as error:
        answer = str(error)
    except Exception as error:  # of a checkpoint that nobody can read
        answer = one_line(error)
    with socket.socket(fileno=descriptor) as connection:
        send_all(connection, ANSWER.dump_json(answer))


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
