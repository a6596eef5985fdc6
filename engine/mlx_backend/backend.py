"""The entry to the MLX backend. Imports no MLX until the BLAS and the environment are ready."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from engine.api import ModelError, Report
from engine.core.step import Backend
from engine.mlx_backend.command_buffers import limit_by_operations
from engine.mlx_backend.cpu.blas import Blas, load_blas
from engine.mlx_backend.errors import one_line
from engine.mlx_backend.loading.checkpoint import find_checkpoint
from engine.values.settings import EngineConfig
from engine.values.stats import MachineReport


@contextmanager
def mlx_imports() -> Iterator[Blas]:
    """Prepare this process for MLX, which the body imports first.

    The BLAS is loaded and the environment that MLX reads is set. The limit of open files stays as
    it is: mlx_lm.utils lowers it to 4,096 when it is imported, a process cannot raise it again, and
    a server needs one file for each connection.
    """
    blas = load_blas()
    limit_by_operations(os.environ)
    with patch.object(resource, "setrlimit"):
        yield blas


def load_backend(config: EngineConfig, report: Report) -> Backend:
    """Load the configured model and allocate its arena, on the thread that will run it.

    `report` gets lines for a person to read. Raises ModelError when the model cannot be served.
    """
    checkpoint = find_checkpoint(config.model, download=True)
    report(f"model {checkpoint}")
    with mlx_imports() as blas:
        if blas.name:
            report(f"BLAS: {blas if blas.library else blas.advice}")
        from engine.mlx_backend import assembly  # noqa: PLC0415 - MLX comes after the BLAS

    try:
        return assembly.assemble(config, checkpoint, blas, report)
    except BaseException as error:
        assembly.release_thread()
        if isinstance(error, Exception) and not isinstance(error, ModelError):
            raise ModelError(one_line(error)) from error
        raise


def describe_machine(config: EngineConfig) -> MachineReport:
    """What the machine offers the configured model; reads no weights and fetches nothing."""
    with mlx_imports() as blas:
        from engine.mlx_backend import assembly  # noqa: PLC0415 - MLX comes after the BLAS

    return assembly.describe(config, blas)
