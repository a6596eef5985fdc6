"""How much work MLX puts into one command buffer of Metal, or into one graph of CUDA.

MLX ends a buffer when the operations in it, or the elements of the arrays that they use, exceed a
limit (`needs_commit` in MLX's `metal/device.cpp` and `cuda/device.cpp`). One layer's pool of KV has
more elements than the default limit, so each operation on a pool would end a buffer, and with more
than ten buffers active MLX waits before it launches more. Here operations alone end a buffer.

MLX reads both limits from the environment once, at their first use. This module imports no MLX.
"""

import sys
from collections.abc import MutableMapping

from engine.mlx_backend.cpu.blas import has_cuda_package

MAX_ELEMENTS = "MLX_MAX_MB_PER_BUFFER"
"""The limit on elements, in units of 2^20 whatever their size. Its name says megabytes."""

MAX_OPERATIONS = "MLX_MAX_OPS_PER_BUFFER"
"""The limit on operations. It is the user's: nothing here sets it."""

UNLIMITED = 2**31 - 1
"""MLX reads the value with `atoi` into an `int` of 32 bits, in which a larger number overflows. It
stands for 2^51 elements, more than the operations of one buffer can use on any machine."""


def limit_by_operations(environment: MutableMapping[str, str]) -> None:
    """Have operations alone end a command buffer, unless the user has set the limit on elements.

    Call it with the process's environment before MLX is imported. A CPU has no command buffers: its
    environment stays as it is.
    """
    if sys.platform == "darwin" or has_cuda_package():
        environment.setdefault(MAX_ELEMENTS, str(UNLIMITED))
