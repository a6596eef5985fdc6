"""What MLX's allocator has given out, and whether a step took more than it was promised."""

import logging
from collections.abc import Callable

import mlx.core as mx

from engine.core.step import ModelRunner, StepMasks, StepPlan, StepResult
from engine.mlx_backend.host.process_memory import process_bytes
from engine.values.stats import MemoryPromise, MemoryStats

logger = logging.getLogger(__name__)

QUIET_SECONDS = 600.0
"""Between one warning and the next."""


class MemoryMeter:
    """Begins when the model has been loaded. `stats` may be asked by any thread."""

    def __init__(self, promise: MemoryPromise, used_bytes: int, clock: Callable[[], float]) -> None:
        """`used_bytes`: what MLX had given out before the model."""
        self._promise = promise
        self._used_bytes = used_bytes
        self._clock = clock
        self._peak = 0
        self._warned: float | None = None  # when, by the clock
        mx.reset_peak_memory()

    def stats(self) -> MemoryStats:
        return MemoryStats(
            active=mx.get_active_memory() - self._used_bytes,
            cached=mx.get_cache_memory(),
            peak=max(self._peak, mx.get_peak_memory()) - self._used_bytes,
            resident=process_bytes(),
            promise=self._promise,
        )

    def stepped(self) -> None:
        """A step has been computed."""
        peak = mx.get_peak_memory()
        mx.reset_peak_memory()
        self._peak = max(self._peak, peak)
        taken = peak - self._used_bytes - self._promise.kept
        if taken > self._promise.workspace:
            self._warn(taken)

    def _warn(self, taken: int) -> None:
        now = self._clock()
        if self._warned is not None and now < self._warned + QUIET_SECONDS:
            return
        self._warned = now
        logger.warning(
            "a step took %.0f MiB beside weights and KV cache; %.0f MiB were promised",
            taken / 2**20,
            self._promise.workspace / 2**20,
        )


class MeteredRunner:
    """A runner whose steps' memory is measured."""

    def __init__(self, runner: ModelRunner, meter: MemoryMeter) -> None:
        self._runner = runner
        self._meter = meter

    def submit(self, plan: StepPlan) -> None:
        self._runner.submit(plan)

    def sample(self, masks: Callable[[], StepMasks] | None) -> None:
        self._runner.sample(masks)

    def collect(self) -> StepResult:
        try:
            return self._runner.collect()
        finally:
            self._meter.stepped()
