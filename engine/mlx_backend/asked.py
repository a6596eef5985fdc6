"""A process that looks at memory and ends: the server imports no MLX.

    python -m engine.mlx_backend.asked SOCKET QUESTION

Both are values of `engine.child_process`; the answer is bytes of memory, or why there is none.
"""

import socket
import sys

from engine.api import ModelError
from engine.child_process import ANSWER, QUESTION, Answer, Needed, Question
from engine.mlx_backend.backend import keep_file_limit
from engine.mlx_backend.cpu.blas import load_blas
from engine.mlx_backend.errors import one_line
from engine.sockets import send_all


def answer(question: Question) -> int:
    """Raises ModelError."""
    load_blas()
    with keep_file_limit():
        from engine.mlx_backend import assembly  # noqa: PLC0415 - MLX comes after the BLAS

    if isinstance(question, Needed):
        return assembly.needed_bytes(question.config, question.storage_bytes)
    return assembly.free_bytes()


def main(descriptor: int, question: Question) -> None:
    try:
        said = Answer(answer(question))
    except ModelError as error:
        said = Answer(error=str(error))
    except Exception as error:  # of a checkpoint that nobody can read
        said = Answer(error=one_line(error))
    with socket.socket(fileno=descriptor) as connection:
        send_all(connection, ANSWER.dump_json(said))


if __name__ == "__main__":
    main(int(sys.argv[1]), QUESTION.validate_json(sys.argv[2]))
