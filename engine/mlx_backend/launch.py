"""When a forward that has been laid out is given to the device.

An arena's write is in place as long as nobody else refers to the array. A forward in flight may.
"""

from collections.abc import Callable
from typing import TypeAlias

import mlx.core as mx

Launch: TypeAlias = Callable[[list[mx.array]], None]
"""Has arrays computed, and what they depend on. Returns while the device computes."""


def launch_ahead(arrays: list[mx.array]) -> None:
    """At once, behind what is in flight. For the CPU, where a task in flight lets go of its inputs
    as soon as it has run, and a pool is written a whole forward after it was last read.
    """
    mx.async_eval(arrays)


def launch_when_idle(arrays: list[mx.array]) -> None:
    """When all that is in flight has been computed. For Metal and CUDA, which keep the buffers of a
    command buffer or graph until it completes: a pool in one of them would be copied.
    """
    mx.synchronize()
    mx.async_eval(arrays)
