"""What a step costs, learned from the steps before it.

    budget.decode(), budget.allow(), budget.chunk()     while the step is planned (step_budget.py)
    costs.observe(budget.work, seconds)                 when it has been computed

It has no clock: its caller measures. A step's seconds are a sum over eight kinds of work,
and the cost of each kind is tracked by a Kalman filter (R. E. Kalman, 1960). A step changes the
estimate of a cost the more, the larger that cost's part of the step and the less is known of it.

Eight numbers are plain floats here: a product of small numpy arrays took 0.5 ms of a step of 13.
"""

import math
from collections.abc import Sequence
from operator import mul

from engine.step.plan import StepWork, chunk_beginning, chunk_work

Vector = Sequence[float]


_PRIOR = (20e-3, 1e-3, 2e-6, 0.7e-3, 3e-7, 6e-6, 2e-3, 0.7e-3)
"""Seconds of one of each kind, in StepWork's order, before any was measured: about what 27 M
parameters take on two cores. The first step scales them all to what it took; their ratios are left.
So what is learned of a model a thousand times as slow is the same in slow motion. On two
cores it costs as much to gather a position as 10 tokens that attend to it, or 90: by KV heads.
"""

_TOKEN, _KEY, _GATHERED = 3, 4, 5  # of prompts

_FIRST_STEPS = 3
"""Where one of these is much shorter than those before it, those are discarded: first steps
compile, and touch memory for the first time."""

_COMMON_VARIANCE, _OWN_VARIANCE = 100.0, 4.0
"""Of the factors by which the prior is wrong: one that all costs share, and one of each."""

_FORGETTING = 0.02
"""The share of what is known of a cost that goes stale with each step that has such work."""

_DOUBT = 0.5
"""The standard deviation of a cost of which all is stale, as a share of the cost."""

_COMMON_DOUBT = 0.9
"""The share of that variance that all costs of a step have in common: a machine changes its speed,
and less what one kind of work takes beside another. In a long run of like steps nothing else tells
these apart.
"""

_LEAST_FACTOR = 0.25
"""A cost is doubted as if it were no less than this share of the prior, as fast as the step was."""

_MOST_DEVIATIONS = 3.0
"""A surprise counts no more than so many standard deviations: a pause, a first allocation."""

_SPREAD_SHARE = 0.05  # of the latest step in the spread
_LEAST_SPREAD, _MOST_SPREAD = 0.03, 0.5

_LEAST_SECONDS = 1e-6  # keeps divisions sound where a test's clock stands still


class StepCosts:
    """Predicts seconds, and learns from those that were measured.

    Costs are kept as factors on the prior, which are alike in size, and are never negative.
    """

    def __init__(self) -> None:
        self._factors = [1.0] * len(_PRIOR)
        self._costs: Vector = _PRIOR  # seconds of one of each kind: a plan asks a dozen times
        self._covariance = [[_COMMON_VARIANCE] * len(_PRIOR) for _ in _PRIOR]
        for kind, row in enumerate(self._covariance):
            row[kind] += _OWN_VARIANCE
        self._spread = 0.1
        self._n_observed = 0

    @property
    def spread(self) -> float:
        """The standard deviation of a step's seconds, as a share of the prediction."""
        return self._spread

    def seconds(self, work: StepWork) -> float:
        """The prediction."""
        return _dot(self._costs, work)

    def prompt_seconds(self, start: int, n_tokens: int) -> float:
        """What so many tokens of a prompt take from a position on, but for what each chunk does
        once.
        """
        whole = self.seconds(chunk_work(start, n_tokens))
        return whole - self.seconds(chunk_beginning(start))

    def chunk_tokens(self, start: int, seconds: float, wanted: int) -> int:
        """How many of `wanted` tokens from position `start` of a prompt these seconds compute.

        n tokens take n * (token + gathered) + (n * start + n * (n + 1) / 2) * key seconds. What a
        chunk of any length takes is not counted; see `chunk_beginning`.
        """
        token, key, gathered = (self._costs[kind] for kind in (_TOKEN, _KEY, _GATHERED))
        linear = token + gathered + key * (start + 0.5)
        divisor = linear + math.sqrt(linear * linear + 2 * key * seconds)
        return wanted if divisor * wanted <= 2 * seconds else int(2 * seconds / divisor)

    def observe(self, work: StepWork, seconds: float) -> None:
        """A step of at least one forward has taken so long."""
        predicted = self.seconds(work)
        factor = max(seconds, _LEAST_SECONDS) / max(predicted, _LEAST_SECONDS)
        self._n_observed += 1
        if self._n_observed == 1 or (self._n_observed <= _FIRST_STEPS and factor < 0.5):
            self._scale(factor)
        else:
            self._learn(list(map(mul, _PRIOR, work)), predicted, seconds)
        self._costs = list(map(mul, _PRIOR, self._factors))

    def _learn(self, parts: Vector, predicted: float, seconds: float) -> None:
        """`parts`: the seconds of each kind of work by the prior."""
        self._forget(parts, predicted)
        size = max(predicted, seconds, _LEAST_SECONDS)
        informed = [_dot(row, parts) for row in self._covariance]
        variance = _dot(parts, informed) + (self._spread * size) ** 2
        most = _MOST_DEVIATIONS * math.sqrt(variance)
        surprise = min(max(seconds - predicted, -most), most)
        for kind, gain in enumerate(informed):
            self._factors[kind] = max(self._factors[kind] + gain * surprise / variance, 0.0)
            row = self._covariance[kind]
            for other, of_other in enumerate(informed):
                row[other] -= gain * of_other / variance
        self._note_spread(abs(surprise) / size)

    def _scale(self, factor: float) -> None:
        """Take the prior for that of a machine so many times as slow."""
        self._factors = [factor * own for own in self._factors]
        self._covariance = [[factor * factor * each for each in row] for row in self._covariance]

    def _forget(self, parts: Vector, predicted: float) -> None:
        """Bring the costs of this work a little nearer to being unknown, and to being unrelated.

        So they can follow a machine whose speed changes, and no run of steps, however long, makes
        the filter sure of what it says nothing of, or doubt it without bound.
        """
        stale = [_FORGETTING if part else 0.0 for part in parts]
        kept = [math.sqrt(1 - share) for share in stale]
        least = _LEAST_FACTOR * predicted / sum(parts)
        doubts = [_DOUBT * max(factor, least) for factor in self._factors]
        common = _COMMON_DOUBT * max(stale)
        for kind, row in enumerate(self._covariance):
            for other in range(len(row)):
                row[other] *= kept[kind] * kept[other]
                row[other] += common * doubts[kind] * doubts[other]
            row[kind] += (1 - _COMMON_DOUBT) * stale[kind] * doubts[kind] ** 2

    def _note_spread(self, deviation: float) -> None:
        # Of a normal distribution the mean deviation is 0.8 standard deviations.
        spread = self._spread + _SPREAD_SHARE * (1.25 * deviation - self._spread)
        self._spread = min(max(spread, _LEAST_SPREAD), _MOST_SPREAD)


def _dot(left: Vector, right: Vector) -> float:
    return float(sum(map(mul, left, right)))
