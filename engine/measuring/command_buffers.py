"""The engine's decode step where a command buffer of the device ends after a number of operations.

The limit is a variable of this process's environment, which MLX reads once: every case is measured
in a process of its own, and `engine.measuring.plan` has the environment of each.
"""

import statistics
from collections.abc import Sequence

from engine.measuring.messages import MeasureConfig
from engine.measuring.plan import BUFFER_OPERATIONS
from engine.measuring.rounds import Figures, rounds
from engine.measuring.step import STEPS, WARM_UP_ROUNDS
from engine.measuring.turned_engine import open_engine


class DoesNotApply(Exception):
    """The device has nothing of what the section measures."""


class CommandBufferMeasurement:
    """A case for each limit. Every case measures all numbers of rows after the shortest context."""

    def __init__(self, config: MeasureConfig, device: str) -> None:
        """`device` as `machine.examine` names it. Raises DoesNotApply on a CPU, and ModelError."""
        if device.startswith("cpu"):
            raise DoesNotApply("MLX has no command buffers on a CPU")
        self._sizes = config.sizes
        self._context_tokens = min(config.sizes.step_contexts)
        self._max_tokens = STEPS * (WARM_UP_ROUNDS + config.sizes.rounds + 2)
        row_tokens = self._context_tokens + self._max_tokens
        self._engine = open_engine(config.engine, max(config.sizes.rows), row_tokens).engine

    def cases(self) -> Sequence[str]:
        return [f"{operations:,} operations" for operations in BUFFER_OPERATIONS]

    def measure(self, case: str) -> Figures:
        """Medians, in milliseconds a step, under this process's limit. Raises RuntimeError where a
        step fails.
        """
        times = {f"{rows}_rows_ms": self._step_milliseconds(rows) for rows in self._sizes.rows}
        memory = self._engine.memory()
        return {
            **times,
            "taken_mib": (memory.peak - memory.promise.kept) / 2**20,
            "cached_mib": memory.cached / 2**20,
        }

    def _step_milliseconds(self, rows: int) -> float:
        self._engine.begin(rows, self._context_tokens, self._max_tokens)
        counted = rounds(WARM_UP_ROUNDS + self._sizes.rounds, self._sizes.case_seconds)
        taken = [self._engine.seconds(STEPS) for _ in counted]
        return 1e3 * statistics.median(taken[WARM_UP_ROUNDS:]) / STEPS
