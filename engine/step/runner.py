"""What a backend gives the engine: a runner for its steps, and all else that a model comes with."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from engine.step.plan import StepMasks, StepPlan, StepResult
from engine.types.memory import MemoryStats
from engine.types.model import ModelCard, Tokenizer
from kvstore.groups.sizes import StorageBytes, StorageSizes


class RunnerLost(Exception):
    """The device's memory is in an unknown state: nothing can be computed any more."""


class ModelRunner(Protocol):
    """Computes steps, one while the next is planned. Lives on the engine thread, where it was made.

        submit(1) sample(1) submit(2) collect(1) sample(2) submit(3) collect(2) ...

    A step with drafts is collected before the next one is submitted.

    Each method may raise whatever the device raises. The step for which `submit` or `sample` has
    raised is forgotten, and all are when `collect` has; the blocks of their rows are undefined
    then, all others untouched. Raises RunnerLost when that cannot be said.
    """

    def submit(self, plan: StepPlan) -> None:
        """Change the batch, and have the forwards begun. Returns while they are, or wait.

        A decode's token may still be on its way: the device has it before the host does. What the
        plan fills in and reads may have to wait for the step in flight.
        """
        ...

    def sample(self, masks: Callable[[], StepMasks]) -> None:
        """Have the step that was submitted last computed, and have it sample, now that the one
        before is collected. Returns while it computes. What `masks` raises is raised.
        """
        ...

    def collect(self) -> StepResult:
        """Wait for the oldest step that has not been collected, and for what it reads."""
        ...


@dataclass(frozen=True, slots=True)
class Backend:
    """All that the engine needs of a loaded model."""

    runner: ModelRunner
    card: ModelCard
    tokenizer: Tokenizer
    hf_tokenizer: Any  # transformers' fast tokenizer
    sizes: StorageSizes
    bytes: StorageBytes
    kv_format: str  # how the bytes lie that a step reads, of each part `part_bytes`
    software: str  # whose numbers these bytes are
    part_bytes: tuple[int, ...]  # of a block, of each window's block, of a state
    memory: Callable[[], MemoryStats]  # on any thread
    release_thread: Callable[[], None]  # gives back what MLX keeps for the thread; its last act
