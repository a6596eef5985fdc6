"""The process that compares attentions: `python -m engine.mlx_backend.tuning.child DESCRIPTOR`.

It receives one task, and answers with the result. Where the process that has started it ends
first, the entry that says `trying` is removed: the device was not at fault.
"""

import os
import sys
import warnings
from contextlib import suppress
from multiprocessing.connection import Connection
from threading import Thread

from engine.mlx_backend.environment import mlx_imports


def main(descriptor: str) -> None:
    warnings.simplefilter("ignore")
    with mlx_imports():
        from engine.mlx_backend.model.attention import gather_of_device  # noqa: PLC0415 - BLAS first
        from engine.mlx_backend.tuning.candidates import candidates_for  # noqa: PLC0415
        from engine.mlx_backend.tuning.race import compare  # noqa: PLC0415
        from engine.mlx_backend.tuning.trial import RESULT, TASK, Task  # noqa: PLC0415

    def wait_for_end(task: Task) -> None:
        with suppress(OSError, EOFError):
            connection.recv_bytes()
        try:
            task.undo()  # unless the result has been written
        finally:
            os._exit(0)

    with Connection(int(descriptor)) as connection:
        task = TASK.validate_json(connection.recv_bytes())
        waiting = Thread(target=wait_for_end, args=[task], daemon=True)
        waiting.start()
        candidates, _ = candidates_for(task.key.kind, gather_of_device())
        found = compare(task.key.kind, candidates, task.budget_bytes, task.seconds)
        connection.send_bytes(RESULT.dump_json(found))
        waiting.join()


if __name__ == "__main__":
    main(sys.argv[1])
