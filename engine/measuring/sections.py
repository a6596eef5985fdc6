"""What measures each section. Imports MLX: `load_blas` comes before."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from engine.measuring.command_buffers import CommandBufferMeasurement
from engine.measuring.memory import MemoryMeasurement
from engine.measuring.messages import Task
from engine.measuring.step import StepMeasurement
from engine.mlx_backend import host
from engine.mlx_backend.measuring.attention import AttentionMeasurement
from engine.mlx_backend.measuring.donation import DonationMeasurement
from engine.mlx_backend.measuring.layouts import LayoutMeasurement
from engine.mlx_backend.measuring.load_check import LoadCheck
from engine.mlx_backend.measuring.opened import MeasuredModel, machine_facts
from engine.mlx_backend.measuring.rounds import Figures
from engine.values.settings import EngineConfig


class Measurement(Protocol):
    """The cases of a section. They are measured in order, each by itself."""

    def cases(self) -> Sequence[str]: ...

    def measure(self, case: str) -> Figures:
        """Raises whatever goes wrong: the next case is measured all the same."""
        ...


class Facts:
    """What is measured, and on what."""

    def __init__(self, config: EngineConfig) -> None:
        self._cases: dict[str, Callable[[], Figures]] = {
            "machine": machine_facts,
            "model": lambda: MeasuredModel(config).facts(),
        }

    def cases(self) -> Sequence[str]:
        return list(self._cases)

    def measure(self, case: str) -> Figures:
        return self._cases[case]()


MEASUREMENTS: Mapping[str, Callable[[Task], Measurement]] = {
    "machine": lambda task: Facts(task.config.engine),
    "attention": lambda task: AttentionMeasurement(task.config.sizes),
    "layouts": lambda task: LayoutMeasurement(task.config.sizes),
    "step": lambda task: StepMeasurement(task.config),
    "memory": lambda task: MemoryMeasurement(task.config),
    "donation": lambda task: DonationMeasurement(task.config.sizes, task.scratch),
    "command buffers": lambda task: CommandBufferMeasurement(task.config, host.examine().device),
    "load check": lambda task: LoadCheck(task.config.sizes, task.scratch),
}
