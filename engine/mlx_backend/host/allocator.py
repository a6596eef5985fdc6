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


def allocator_limits(host: Machine, used_bytes: int, working_bytes: int) -> AllocatorLimits:
    """For what a machine had left when MLX used `used_bytes`, and a step takes `working_bytes`.

    Memory: what we use and what we can have. MLX's own limit knows of no others: 95% of a CUDA
    device, 1.5 times Metal's working set, four fifths of the machine's memory and not of the
    container's on a CPU; and once weights and arena alone are above it, each operation waits for
    the one before.

    Cache: the buffers of one step, so that the next finds them all. MLX's own limit on GPUs is that
    of memory: buffers of every size that was ever needed would stay.
    """
    return AllocatorLimits(used_bytes + host.most_bytes, working_bytes)


def limit_allocator(limits: AllocatorLimits) -> None:
    """Tell MLX, for the whole process.

    On a CPU its cache stays as MLX has it, 32 MiB: the C library keeps what is freed. Prompts and
    decodes caused as few page faults without any cache as with 512 MiB: none.
    """
    mx.set_memory_limit(limits.memory)
    if mx.default_device() != mx.cpu:
        mx.set_cache_limit(limits.cache)
