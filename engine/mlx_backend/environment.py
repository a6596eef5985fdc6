"""How MLX is imported: after the BLAS, and in the environment that it should read."""

import os
import resource
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from engine.api import ModelError, one_line
from engine.mlx_backend.blas import Blas, has_cuda_package, install_command, load_blas

MAX_ELEMENTS = "MLX_MAX_MB_PER_BUFFER"
"""The environment variable that limits the elements of arrays that one command buffer of Metal, or
one graph of CUDA, uses. Its unit is 2^20 elements of any size, although its name says megabytes."""

MAX_OPERATIONS = "MLX_MAX_OPS_PER_BUFFER"
"""The environment variable that limits the operations of a command buffer. Nothing here sets it."""

UNLIMITED = 2**31 - 1
"""The largest value of MAX_ELEMENTS: MLX reads it with `atoi` into an `int` of 32 bits. It stands
for 2^51 elements, more than the operations of one buffer can use on any machine."""


@contextmanager
def mlx_imports() -> Iterator[Blas]:
    """Import MLX. The body imports what needs it. Raises ModelError where MLX does not start.

    The BLAS is loaded before, and the environment that MLX reads is set. The limit of open files
    stays as it is: mlx_lm.utils lowers it to 4,096 when it is imported, a process cannot raise it
    again, and a server needs one file for each connection.
    """
    blas = load_blas()
    limit_by_operations(os.environ)
    with patch.object(resource, "setrlimit"):
        try:
            import mlx.core  # noqa: F401, PLC0415 - the BLAS comes before
        except ImportError as error:
            raise ModelError(_why_mlx_does_not_start(one_line(error))) from error
        yield blas


def _why_mlx_does_not_start(problem: str) -> str:
    """What to do about it. MLX's own packages for Linux hold no library to compute with: that is
    one more package, for processors or for CUDA.
    """
    if has_cuda_package():
        return (
            f"MLX for CUDA does not start, which needs an NVIDIA card and its driver: {problem}. "
            "To compute on the processor instead, install the extra cpu into a new environment, "
            "or in a clone: make serve BACKEND=cpu"
        )
    install = install_command(Path(sys.prefix), sys.executable)
    return (
        f"MLX does not start: {problem}. On Linux it needs a package to compute with: "
        f"{install} 'mlx[cpu]', or 'mlx[cuda13]' for an NVIDIA card"
    )


def limit_by_operations(environment: MutableMapping[str, str]) -> None:
    """Let the number of operations alone end a command buffer, unless the user has set the limit on
    elements. Has no effect after MLX has been imported, and does nothing on a CPU.

    MLX ends a buffer when either limit is exceeded (`needs_commit` in MLX's `metal/device.cpp` and
    `cuda/device.cpp`). One layer's KV pool has more elements than the default limit, so each
    operation on a pool would end a buffer, and with more than ten active buffers MLX waits before
    it launches more.
    """
    if sys.platform == "darwin" or has_cuda_package():
        environment.setdefault(MAX_ELEMENTS, str(UNLIMITED))
