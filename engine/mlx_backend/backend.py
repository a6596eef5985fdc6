"""The entry to the MLX backend. Imports no MLX until the BLAS and the environment are ready."""

from typing import TYPE_CHECKING

from engine.api import ModelError, Report, one_line
from engine.core.step import Backend
from engine.encoders.thread import EncoderParts
from engine.mlx_backend.blas import Blas
from engine.mlx_backend.environment import mlx_imports
from engine.mlx_backend.loading.locate import find_checkpoint
from engine.values.settings import EngineConfig
from engine.values.stats import MachineReport

if TYPE_CHECKING:  # most models have one rank
    from engine.mlx_backend.ranks.group import Ranks


def load_backend(config: EngineConfig, report: Report) -> Backend:
    """Load the configured decoder and allocate its arena, on the thread that will run it. It must
    have been fetched.

    `report` gets lines for a person to read. Raises ModelError when the model cannot be served.
    """
    checkpoint = find_checkpoint(config.model, download=False)
    report(f"model {checkpoint}")
    with mlx_imports() as blas:
        _report_blas(blas, report)
        from engine.mlx_backend.loading.compiler import start_compiler  # noqa: PLC0415 - BLAS first

        compiler = start_compiler()  # while the imports that follow take their time
        from engine.mlx_backend import assembly  # noqa: PLC0415

    ranks: Ranks | None = None
    try:
        if config.ranks > 1:
            from engine.mlx_backend.ranks.start import start_ranks  # noqa: PLC0415 - see above

            ranks = start_ranks(config, checkpoint, report)
        opened = assembly.open_checkpoint(config, checkpoint, ranks)
        return assembly.assemble_opened(config, opened, blas, report, compiler)
    except BaseException as error:
        if ranks is not None:
            ranks.close()
        assembly.release_thread()
        if isinstance(error, Exception) and not isinstance(error, ModelError):
            raise ModelError(one_line(error)) from error
        raise


def load_encoder(config: EngineConfig, report: Report) -> EncoderParts:
    """Load the configured encoder, which must have been fetched, on the thread that will run it.
    Raises ModelError.
    """
    checkpoint = find_checkpoint(config.model, download=False)
    report(f"model {checkpoint}")
    if config.ranks > 1:
        raise ModelError("it is an encoder, which ranks do not divide: set ranks to 1")
    with mlx_imports() as blas:
        _report_blas(blas, report)
        import mlx.core as mx  # noqa: PLC0415 - BLAS first

        from engine.mlx_backend.encoders import loading  # noqa: PLC0415

    try:
        opened = loading.open_encoder(config, checkpoint)
        return loading.assemble_encoder(config, opened, blas, report)
    except BaseException as error:
        mx.clear_streams()
        if isinstance(error, Exception) and not isinstance(error, ModelError):
            raise ModelError(one_line(error)) from error
        raise


def _report_blas(blas: Blas, report: Report) -> None:
    if blas.name:
        report(f"BLAS: {blas if blas.library else blas.advice}")


def describe_machine(config: EngineConfig) -> MachineReport:
    """Describe the device and how the configured model would fit. Reads no weights and fetches
    nothing.
    """
    with mlx_imports() as blas:
        from engine.mlx_backend import assembly  # noqa: PLC0415 - MLX comes after the BLAS

    return assembly.describe(config, blas)
