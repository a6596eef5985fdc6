"""A machine whose steps take what its costs say, give or take some noise."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from engine.core.budget import StepBudget, StepCosts
from engine.core.step import StepWork

CPU = (12e-3, 1.3e-3, 3e-6, 0.6e-3, 0.5e-6, 5e-6, 1e-3, 1e-3)
GPU = (20e-3, 0.05e-3, 0.02e-6, 0.02e-3, 0.001e-6, 0.01e-6, 1e-3, 0.05e-3)
SLOW_CPU = (100e-3, 5e-3, 1e-6, 6e-3, 0.5e-6, 5e-6, 2e-3, 5e-3)
"""Seconds of each kind of work, in StepWork's order."""


def beside(costs: StepCosts, limit_seconds: float, contexts: Sequence[int]) -> StepBudget:
    """The budget of a step with decodes behind so many tokens each, which may take so long."""
    decodes = StepWork(1, len(contexts), sum(context_tokens + 1 for context_tokens in contexts))
    budget = StepBudget(costs, limit_seconds / max(costs.seconds(decodes), 1e-9))
    for context_tokens in contexts:
        budget.decode(context_tokens)
    return budget


@dataclass(slots=True)
class Machine:
    """Computes steps of some decodes and one prompt, whose chunks a budget chooses."""

    costs_seconds: Sequence[float]
    limit_seconds: float
    noise: float = 0.05
    step_tokens: int = 512
    seed: int = 0
    learned: StepCosts = field(default_factory=StepCosts)
    contexts: list[int] = field(default_factory=lambda: [40, 60, 80, 100])
    speed: float = 1.0
    _random: Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = Random(self.seed)

    def seconds(self, work: StepWork) -> float:
        """Of such a step, without noise."""
        costs = zip(self.costs_seconds, work, strict=True)
        return math.fsum(cost * count for cost, count in costs) / self.speed

    def error(self, work: StepWork) -> float:
        """Of the prediction, as a share of the truth."""
        return abs(self.learned.seconds(work) / self.seconds(work) - 1)

    def decode(self, n_steps: int, pause_seconds: float = 0.0) -> None:
        for _ in range(n_steps):
            self._compute(self._budget(), pause_seconds)

    def prompt(self, n_tokens: int) -> list[float]:
        """The seconds of the steps that compute a prompt beside the decodes."""
        seconds, start = [], 0
        while start < n_tokens:
            budget = self._budget()
            wanted = min(self.step_tokens - len(self.contexts), n_tokens - start)
            allowed = budget.allow(start, wanted)
            budget.chunk(start, allowed)
            start += allowed
            seconds.append(self._compute(budget))
        return seconds

    def _budget(self) -> StepBudget:
        budget = beside(self.learned, self.limit_seconds, self.contexts)
        self.contexts = [context_tokens + 1 for context_tokens in self.contexts]
        return budget

    def _compute(self, budget: StepBudget, pause_seconds: float = 0.0) -> float:
        noise = math.exp(self._random.gauss(0, self.noise))
        seconds = self.seconds(budget.work) * noise + pause_seconds
        self.learned.observe(budget.work, seconds)
        return seconds
