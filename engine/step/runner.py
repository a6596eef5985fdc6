"""The seam between the scheduler's world and the device's."""

from collections.abc import Callable
from typing import Protocol

from engine.step.plan import StepMasks, StepPlan, StepResult


class RunnerLost(Exception):
    """The device's memory is in an unknown state: nothing can be computed any more."""


class ModelRunner(Protocol):
    """Computes steps, one while the next is planned. Lives on the engine thread, where it was made.

        submit(1) sample(1) submit(2) collect(1) sample(2) submit(3) collect(2) ...

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
