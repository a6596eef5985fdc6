"""The device that MLX computes on, its memory, and the memory of this process.

Swap does not count as memory, because weights and KV are read at every step.
"""

import ctypes
import logging
import os
import re
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import psutil

from engine.process.cgroups import lines, memory_groups, number
from engine.process.footprint import footprint_bytes
from engine.values.stats import MemoryStats, ModelMemory

logger = logging.getLogger(__name__)

_GPU_SHARE = 0.8
_CPU_SHARE = 0.1  # other programs use the memory too, and the arena is filled at start
_MEMORY_KEYS = ("max_recommended_working_set_size", "total_memory", "memory_size")
_AMPERE = 8  # the least compute capability for which MLX uses the attention of cuDNN


class FusedAttention(Enum):
    """Which of MLX's attention kernels, those that keep no scores in memory, a device has."""

    NONE = "none"
    METAL = "metal"
    CUDA = "cuda"


@dataclass(frozen=True, slots=True)
class Machine:
    """MLX's default device, and its memory."""

    device: str  # "cpu" or "gpu", with its name
    memory_bytes: int
    left_bytes: int  # not used by this process or, on a CPU, by any process
    most_bytes: int  # the most that we may use; on Metal, other programs then have to free memory
    kv_share: float  # the KV cache's share of `left_bytes`, where no setting gives its size
    fused: FusedAttention = FusedAttention.NONE


class HostMemory(NamedTuple):
    """The memory that a process may use."""

    total_bytes: int  # of the machine, or of the container
    left_bytes: int  # unused, or used for cached files only


def examine_for(memory_bytes: int | None) -> Machine:
    """The default device as it is now. At most `memory_bytes` of its memory are ours; None: all."""
    found = examine()
    if memory_bytes is None:
        return found
    return replace(
        found,
        left_bytes=min(found.left_bytes, memory_bytes),
        most_bytes=min(found.most_bytes, memory_bytes),
        kv_share=1.0,
    )


def shared(machine: Machine, n: int) -> Machine:
    """One of `n` equal shares of a machine's memory."""
    return replace(machine, left_bytes=machine.left_bytes // n, most_bytes=machine.most_bytes // n)


def examine() -> Machine:
    """The default device as it is now."""
    info, name = mx.device_info(), device_name()
    host = host_memory()
    if mx.default_device() == mx.cpu:
        left_bytes = host.left_bytes
        return Machine(name, host.total_bytes, left_bytes, left_bytes, _CPU_SHARE)
    memory_bytes = device_memory_bytes(info)
    most_bytes = memory_bytes - mx.get_active_memory()
    if mx.metal.is_available():
        left_bytes = min(most_bytes, host.left_bytes)  # the GPU's memory is the machine's
        fused = FusedAttention.METAL
    else:
        left_bytes = most_bytes = min(most_bytes, int(info.get("free_memory", sys.maxsize)))
        has_cudnn = int(info.get("compute_capability_major", 0)) >= _AMPERE
        fused = FusedAttention.CUDA if has_cudnn else FusedAttention.NONE
    return Machine(name, memory_bytes, left_bytes, most_bytes, _GPU_SHARE, fused)


def device_name() -> str:
    """The default device: `cpu (Intel(R) Xeon(R) Processor)`, `gpu (Apple M4)`."""
    kind = "cpu" if mx.default_device() == mx.cpu else "gpu"
    return f"{kind} ({mx.device_info().get('device_name', 'unknown')})"


def device_memory_bytes(info: Mapping[str, str | int]) -> int:
    """The memory of a GPU in `mx.device_info`, where Metal and CUDA name it differently."""
    return next((int(info[key]) for key in _MEMORY_KEYS if key in info), 0)


def limit_allocator(memory_bytes: int, cache_bytes: int) -> None:
    """Set the limits of MLX's allocator, for the whole process.

    Beyond `memory_bytes` MLX waits for launched operations to return their buffers, and on a GPU
    frees cached buffers first. It never refuses memory. MLX's default ignores other programs: it is
    95% of a CUDA device, 1.5 times Metal's working set, or on a CPU four fifths of the machine's
    memory even in a container. If weights and arena alone exceed the limit, each operation waits
    for the one before.

    `cache_bytes` bounds the unused buffers that MLX keeps. On GPUs the default is the memory limit,
    so that buffers of every size that was ever needed would stay. On a CPU it is 32 MiB, less than
    one step samples with a large vocabulary, and each 4 KiB that the system has taken back costs a
    page fault: the log-probabilities of 16 rows of 151,936 tokens took 18 ms instead of 10.

    Metal also keeps up to `memory_bytes` resident, because memory that was paged out is slow to
    return. Each of several engines on a machine wires only the memory that it may use.
    """
    mx.set_memory_limit(memory_bytes)
    mx.set_cache_limit(cache_bytes)
    if mx.metal.is_available():
        mx.set_wired_limit(min(memory_bytes, device_memory_bytes(mx.device_info())))


def host_memory() -> HostMemory:
    """The memory that this process may use now: within its control groups, `ulimit -v`, and the
    kernel's commit limit where overcommitting is forbidden.
    """
    memory, root = psutil.virtual_memory(), Path("/")
    total, left = within_cgroups(HostMemory(memory.total, memory.available), root)
    if number(root / "proc/sys/vm/overcommit_memory") == 2:
        words = (line.split() for line in lines(root / "proc/meminfo"))
        kibibytes = {each[0]: int(each[1]) for each in words}
        left = min(left, 1024 * (kibibytes["CommitLimit:"] - kibibytes["Committed_AS:"]))
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if address_space != resource.RLIM_INFINITY:
        left = min(left, address_space - int(psutil.Process().memory_info().vms))
    return HostMemory(total, max(left, 0))


def within_cgroups(memory: HostMemory, root: Path) -> HostMemory:
    """The part of a machine's memory that the control groups of this process allow.

    `root` is the directory with /proc and /sys. The limit of a service or a container may be set on
    any group above the process's own.
    """
    total, left = memory
    for group in memory_groups(root):
        if (limit := group.limit_bytes()) < memory.total_bytes:
            total = min(total, limit)
            left = min(left, limit - group.used_bytes())
    return HostMemory(total, max(left, 0))


def process_bytes(open_library: Callable[[], Any] = lambda: ctypes.CDLL(None)) -> int:
    """Memory of this process: on macOS its footprint, since the resident set does not always
    include Metal's buffers. Elsewhere, and where macOS does not answer, it is the resident set.

    `open_library` opens the libraries that this process is linked with, or raises OSError.
    """
    footprint = footprint_bytes(os.getpid(), open_library)
    return int(psutil.Process().memory_info().rss) if footprint is None else footprint


_NO_MEMORY = re.compile(
    "unable to allocate|attempting to allocate|out of memory|outofmemory|insufficient memory"
    "|memoryallocation",
    re.IGNORECASE,
)


def is_lack_of_memory(error: BaseException) -> bool:
    """Whether MLX or Python could not allocate memory. MLX raises RuntimeError, in its own words or
    in those of Metal and CUDA.
    """
    return isinstance(error, MemoryError) or _NO_MEMORY.search(str(error)) is not None


QUIET_SECONDS = 600.0
"""The least time between two warnings."""


class KeptArrays(NamedTuple):
    """The arrays that a model keeps between steps, and the bytes of recurrent states in them."""

    n_arrays: int
    state_bytes: int


def most_arrays() -> int:
    """The buffers that the device allows a process; 0 where it states no limit. Metal's allocator
    refuses memory beyond them, however little is in use.
    """
    return int(mx.device_info().get("resource_limit", 0)) if mx.metal.is_available() else 0


def release_unused() -> None:
    """Give the memory that nothing uses back to the system: buffers that MLX keeps for the next
    step, and of glibc's allocator the free parts of its pages. Any thread may call it.
    """
    mx.clear_cache()
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


class MemoryMeter:
    """Measures the memory of each step, and compares it with what was reserved."""

    def __init__(
        self,
        planned: ModelMemory,
        step_bytes: int,
        used_bytes: int,
        clock: Callable[[], float] = time.monotonic,
        kept: Callable[[], KeptArrays] | None = None,
    ) -> None:
        """`step_bytes`: the most that a step may take in addition to what is kept between steps.
        `used_bytes`: what MLX's allocator had given out before the model was loaded. `kept` is
        called on any thread; None: the model keeps nothing but its weights.
        """
        self._kept = kept
        self._most_arrays = 0 if kept is None else most_arrays()
        self._planned = planned
        self._step_bytes = step_bytes
        self._used_bytes = used_bytes
        self._clock = clock
        self._peak = 0
        self._warned: float | None = None  # the clock's time of the last warning
        mx.reset_peak_memory()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure the peak of a step that ends within the block, also one that fails. Logs a
        warning if it took more than was reserved.
        """
        try:
            yield
        finally:
            peak = mx.get_peak_memory()
            mx.reset_peak_memory()
            self._peak = max(self._peak, peak)
            taken, reserved = peak - self._used_bytes - self._planned.kept_bytes, self._step_bytes
            now = self._clock()
            if taken > reserved and (self._warned is None or now >= self._warned + QUIET_SECONDS):
                self._warned = now
                line = "a step took %.0f MiB on top of weights and KV cache; %.0f MiB were reserved"
                logger.warning(line, taken / 2**20, reserved / 2**20)

    def stats(self) -> MemoryStats:
        """The memory now. Any thread may call it."""
        resident, total = process_bytes(), self._planned.total_bytes
        kept = KeptArrays(0, 0) if self._kept is None else self._kept()
        return MemoryStats(
            replace(self._planned, process_bytes=resident, total_bytes=max(total, resident)),
            active=mx.get_active_memory() - self._used_bytes,
            cached=mx.get_cache_memory(),
            peak=max(self._peak, mx.get_peak_memory()) - self._used_bytes,
            states=kept.state_bytes,
            arrays=kept.n_arrays,
            most_arrays=self._most_arrays,
        )
