"""A machine whose steps take what its profile says, with noise, pauses and changes of speed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from engine.core.budget import StepBudget, StepCosts, StepShape


class Profile(NamedTuple):
    """Seconds of one unit of each kind of work."""

    forward: float
    row: float
    decode_key: float
    token: float
    key: float  # for each token of a chunk that attends to it
    gather: float  # of a key, once for each chunk
    tile: int = 1  # a forward computes its tokens in tiles of this width, once it exceeds one
    free_tokens: int = 0  # computed while the weights are read

    def scaled(self, factor: float) -> "Profile":
        forward, row, decode_key, token, key, gather = (factor * each for each in self[:6])
        return Profile(forward, row, decode_key, token, key, gather, self.tile, self.free_tokens)

    def seconds(self, shape: StepShape) -> float:
        """Seconds of a step without noise."""
        total = 0.0
        if shape.decode_rows:
            total += self.forward + self.row * self._computed(shape.decode_rows)
            total += self.decode_key * shape.decode_keys
        for start, n_tokens in shape.chunks:
            attended = sum(range(start + 1, start + n_tokens + 1))
            total += self.forward + self.token * self._computed(n_tokens)
            total += self.key * attended + self.gather * (start + n_tokens)
        return total

    def _computed(self, width: int) -> int:
        if width > self.tile:
            width = math.ceil(width / self.tile) * self.tile
        return max(width - self.free_tokens, 0)


CPU = Profile(12e-3, 1.3e-3, 3e-6, 0.6e-3, 0.5e-6, 5e-6)
GPU = Profile(20e-3, 0.05e-3, 0.02e-6, 0.02e-3, 0.001e-6, 0.01e-6)
SLOW_CPU = Profile(100e-3, 5e-3, 1e-6, 6e-3, 0.5e-6, 5e-6)
TILED_CPU = Profile(12e-3, 1.3e-3, 3e-6, 0.6e-3, 0.36e-6, 3.5e-6, tile=32)
MANY_HEADS = Profile(100e-3, 8e-3, 60e-6, 6e-3, 1.5e-6, 60e-6, tile=16)
SATURATING_GPU = Profile(20e-3, 0.1e-3, 2e-8, 0.1e-3, 1e-8, 1e-7, tile=64, free_tokens=192)


def limited(costs: StepCosts, limit_seconds: float, contexts: Sequence[int]) -> StepBudget:
    """The budget of a step that may take `limit_seconds`, with a decode after each context."""
    shape = StepShape(len(contexts), sum(context_tokens + 1 for context_tokens in contexts))
    budget = StepBudget(costs, limit_seconds / max(costs.predict(shape), 1e-9))
    budget.add_decodes(*shape[:2])
    return budget


class Step(NamedTuple):
    """A step that was computed. `true_seconds` and `limit_seconds` are without noise."""

    n_tokens: int  # of the prompt
    predicted_seconds: float
    true_seconds: float
    seconds: float
    limit_seconds: float
    spread: float


@dataclass(slots=True)
class Machine:
    """Computes steps of some decodes and one prompt, whose chunks a budget chooses. A step may take
    `limit_seconds`, or where that is None `stretch` times what the model predicts of the decodes.
    """

    profile: Profile
    limit_seconds: float | None = None
    stretch: float = 4.0
    noise: float = 0.05  # standard deviation of the logarithm
    outliers: float = 0.0  # share of the steps that take up to 2.5 times as long
    step_tokens: int = 512
    seed: int = 0
    learned: StepCosts = field(default_factory=StepCosts)
    contexts: list[int] = field(default_factory=lambda: [40, 60, 80, 100])
    speed: float = 1.0
    _random: Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = Random(self.seed)

    def seconds(self, shape: StepShape) -> float:
        """Seconds of such a step, without noise."""
        return self.profile.seconds(shape) / self.speed

    def error(self, shape: StepShape) -> float:
        """The error of the prediction, as a share of the truth."""
        return abs(self.learned.predict(shape) / self.seconds(shape) - 1)

    def decode(self, n_steps: int, pause_seconds: float = 0.0) -> list[Step]:
        return [self._compute(self._budget(), 0, pause_seconds) for _ in range(n_steps)]

    def prompt(self, n_tokens: int) -> list[Step]:
        """The steps that compute a prompt next to the decodes."""
        steps, start = list[Step](), 0
        while start < n_tokens:
            budget = self._budget()
            wanted = min(self.step_tokens - len(self.contexts), n_tokens - start)
            allowed = budget.chunk_tokens(start, wanted)
            budget.add_chunk(start, allowed)
            start += allowed
            steps.append(self._compute(budget, allowed))
        return steps

    def _budget(self) -> StepBudget:
        if self.limit_seconds is not None:
            budget = limited(self.learned, self.limit_seconds, self.contexts)
        else:
            budget = StepBudget(self.learned, self.stretch)
            budget.add_decodes(len(self.contexts), sum(self.contexts) + len(self.contexts))
        self.contexts = [context_tokens + 1 for context_tokens in self.contexts]
        return budget

    def _compute(self, budget: StepBudget, n_tokens: int, pause_seconds: float = 0.0) -> Step:
        shape = budget.shape
        predicted, true = self.learned.predict(shape), self.seconds(shape)
        limit = self.limit_seconds
        if limit is None:
            limit = self.stretch * self.seconds(shape.decodes)
        seconds = true * math.exp(self._random.gauss(0, self.noise)) + pause_seconds
        if self._random.random() < self.outliers:
            seconds *= 1 + 1.5 * self._random.random()
        spread = self.learned.spread
        self.learned.observe(shape, seconds)
        return Step(n_tokens, predicted, true, seconds, limit, spread)


def trace_machine(profile: Profile, seed: int, limit_seconds: float | None) -> Machine:
    """As noisy as a shared virtual machine (0.11 to 0.15) that at times waits for page faults."""
    return Machine(profile, limit_seconds, noise=0.13, outliers=0.02, seed=seed)


def long_prompt(profile: Profile, seed: int) -> list[Step]:
    """A prompt of 3,611 tokens next to four streams: a step may take four times their time."""
    machine = trace_machine(profile, seed, limit_seconds=None)
    machine.decode(30)
    return machine.prompt(3611)


def slow_down(profile: Profile, seed: int) -> tuple[list[Step], list[Step], list[Step]]:
    """A machine slows down to a third between two prompts. Returns the decodes after that, and the
    steps of two more prompts.
    """
    decodes = profile.seconds(StepShape(4, 1000))
    machine = trace_machine(profile, seed, limit_seconds=14 * decodes)
    machine.step_tokens = 2048
    machine.decode(50)
    machine.prompt(2000)
    machine.speed = 1 / 3
    return machine.decode(40), machine.prompt(4000), machine.prompt(4000)


def worst_step(steps: Sequence[Step]) -> float:
    """The largest share of its limit that a step took, without noise."""
    return max(step.true_seconds / step.limit_seconds for step in steps)


def root_mean_square(steps: Sequence[Step]) -> float:
    """The error of the predictions, as a share of what was measured."""
    errors = (step.predicted_seconds / step.seconds - 1 for step in steps)
    return math.sqrt(math.fsum(error * error for error in errors) / len(steps))


def seconds_of(steps: Sequence[Step]) -> float:
    return math.fsum(step.seconds for step in steps)
