"""The entry to the MLX backend. Imports no MLX until the BLAS and the environment are ready."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from engine.api import ModelError, Report
from engine.core.step import Backend
from engine.mlx_backend.command_buffers import limit_by_operations
from engine.mlx_backend.cpu.blas import load_blas
from engine.mlx_backend.errors import one_line
from engine.mlx_backend.loading.checkpoint import find_checkpoint
from engine.values.settings import EngineConfig
from engine.values.stats import MachineReport


def load_backend(config: EngineConfig, report: Report) -> Backend:
    """Load the configured model and allocate its arena, on the thread that will run it.

    `report` gets lines for a person to read. Raises ModelError when the model cannot be served.
    """
    checkpoint = find_checkpoint(config.model, download=True)
    report(f"model {checkpoint}")
    blas = load_blas()
    if blas.name:
        report(f"BLAS: {blas if blas.library else blas.advice}")
    limit_by_operations(os.environ)
    with keep_file_limit():
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
    blas = load_blas()
    with keep_file_limit():
        from engine.mlx_backend import assembly  # noqa: PLC0415 - MLX comes after the BLAS

    return assembly.describe(config, blas)


@contextmanager
def keep_file_limit() -> Iterator[None]:
    """Imports in the body leave the limit of open files alone: a process cannot raise it again.

    mlx_lm.utils sets 2,048, and 4,096 for good. A server needs one file for each connection.
    """
    with patch.object(resource, "setrlimit"):
        yield
