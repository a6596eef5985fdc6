"""The process that measures a section, started as `python -m engine.measuring.worker DESCRIPTOR`.

A device may end it: Metal does where a command buffer does not get its memory. What it has sent
until then is kept, and another process goes on behind the case that ended it.
"""

import os
import sys
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from engine.measuring.messages import MEASURED, NAMES, TASK, MeasuredCase, Task
from engine.measuring.reasons import reason
from engine.mlx_backend.backend import keep_file_limit
from engine.mlx_backend.command_buffers import limit_by_operations
from engine.mlx_backend.cpu.blas import load_blas
from engine.mlx_backend.measuring.rounds import Figures

if TYPE_CHECKING:
    from engine.measuring.sections import Measurement


def serve(connection: Connection, begin: "Callable[[Task], Measurement]") -> None:
    """Take a task, and answer it. `begin` makes what measures it.

    A section that cannot begin has one case, its own, with the reason.
    """
    task = TASK.validate_json(connection.recv_bytes())
    try:
        measurement = begin(task)
    except (Exception, SystemExit) as error:
        connection.send_bytes(NAMES.dump_json([task.section]))
        failed = MeasuredCase(task.section, {}, 0, reason(error))
        connection.send_bytes(MEASURED.dump_json(failed))
        return
    names = list(measurement.cases())
    connection.send_bytes(NAMES.dump_json(names))
    for name in names[task.first : task.stop]:
        connection.send_bytes(MEASURED.dump_json(_measured(measurement, name)))


def _measured(measurement: "Measurement", name: str) -> MeasuredCase:
    started, problem = time.perf_counter(), ""
    figures: Figures = {}
    try:
        figures = measurement.measure(name)
    # Models raise whatever they like, and one exits when a package of its own is missing.
    except (Exception, SystemExit) as error:
        problem = reason(error)
    return MeasuredCase(name, figures, time.perf_counter() - started, problem)


def main(descriptor: str) -> None:
    """Serve the connection of that number."""
    warnings.simplefilter("ignore")
    load_blas()
    limit_by_operations(os.environ)
    with keep_file_limit():
        from engine.measuring.sections import (  # noqa: PLC0415 - MLX comes after the BLAS
            MEASUREMENTS,
        )

    with Connection(int(descriptor)) as connection:
        serve(connection, lambda task: MEASUREMENTS[task.section](task))


if __name__ == "__main__":
    main(sys.argv[1])
