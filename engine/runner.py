"""The seam between the scheduler's world and the device's."""

from typing import Protocol

from engine.step import AskMasks, StepPlan, StepResult


class RunnerLost(Exception):
    """The device's memory is in an unknown state: nothing can be computed any more."""


class ModelRunner(Protocol):
    """Computes steps. Lives on the engine thread, where it was made."""

    def run(self, plan: StepPlan, masks: AskMasks) -> StepResult:
        """Carry out the orders, write the rows' KV into their blocks, sample where asked.

        `masks` is asked for those of `masked` rows when their forward is under way.
        Returns when everything has been computed. Raises whatever the device raises; the rows'
        blocks are then undefined, all others untouched. Raises RunnerLost when that cannot be said.
        """
        ...
