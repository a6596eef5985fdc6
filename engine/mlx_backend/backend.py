"""The door of the MLX backend. Imports no MLX until the BLAS has been loaded."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine.groups import StorageBytes, StorageSizes
from engine.mlx_backend.blas import load_blas
from engine.mlx_backend.errors import ModelError, one_line
from engine.mlx_backend.file_limit import keep_file_limit
from engine.runner import ModelRunner
from engine.types import EngineConfig, MachineReport, ModelCard, Tokenizer


@dataclass(frozen=True, slots=True)
class Backend:
    """All that the engine needs of a loaded model."""

    runner: ModelRunner
    card: ModelCard
    tokenizer: Tokenizer
    hf_tokenizer: Any  # transformers' fast tokenizer
    sizes: StorageSizes
    bytes: StorageBytes
    release_thread: Callable[[], None]  # gives back what MLX keeps for the thread; its last act


def load_backend(config: EngineConfig, report: Callable[[str], None]) -> Backend:
    """Load the configured model and allocate its arena, on the thread that will run it.

    `report` gets lines for a person to read. Raises ModelError when the model cannot be served.
    """
    blas = load_blas()
    if blas.name:
        report(f"BLAS: {blas.name} {blas.library}" if blas.library else f"BLAS: {blas.advice}")
    with keep_file_limit():
        from engine.mlx_backend import assembly  # noqa: PLC0415 - MLX comes after the BLAS

    try:
        return assembly.assemble(config, blas, report)
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
