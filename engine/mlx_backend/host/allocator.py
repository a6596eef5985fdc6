"""What MLX's allocator may take of the machine, and what it may keep for later."""

from dataclasses import dataclass

import mlx.core as mx

from engine.mlx_backend.host.machine import Machine


@dataclass(frozen=True, slots=True)
class AllocatorLimits:
    """Bytes. Both are wishes to MLX: it never refuses memory because of them.

    Beyond `memory` it waits for what has been launched to give its buffers back, and on GPUs first
    gives up buffers that it keeps. `cache` is what it keeps of buffers that nobody uses.
    """

    memory: int
    cache: int


def held_steps(host: Machine) -> int:
    """How many steps' arrays count in the memory plan: that of the step being computed, and that of
    MLX's buffer cache, which keeps as many bytes at most (`AllocatorLimits.cache`).

    On a GPU the cache does not count in addition: MLX frees cached buffers before those in use and
    those cached exceed the memory limit together (`malloc` in MLX's `metal/allocator.cpp` and
    `cuda/allocator.cpp`). So they fit into what the plan has for a step. On a CPU it frees none.
    """
    return 2 if host.device.startswith("cpu") else 1


def allocator_limits(host: Machine, used_bytes: int, step_bytes: int) -> AllocatorLimits:
    """For what a machine had left when MLX used `used_bytes`, and the arrays of a step take
    `step_bytes`.

    Memory: what we use and what we can have. MLX's own limit knows of no others: 95% of a CUDA
    device, 1.5 times Metal's working set, four fifths of the machine's memory and not of the
    container's on a CPU; and once weights and arena alone are above it, each operation waits for
    the one before.

    Cache: the buffers of one step, so that the next finds them all. MLX's own limit on GPUs is that
    of memory: buffers of every size that was ever needed would stay.
    """
    return AllocatorLimits(used_bytes + host.most_bytes, step_bytes)


def limit_allocator(limits: AllocatorLimits) -> None:
    """Tell MLX, for the whole process.

    On a CPU its own cache of 32 MiB is less than sampling with a large vocabulary takes in one
    step, and memory that the system has taken back costs a page fault for each 4 KiB: the
    log-probabilities of 16 rows of 151,936 tokens took 18 ms in place of 10.
    """
    mx.set_memory_limit(limits.memory)
    mx.set_cache_limit(limits.cache)
