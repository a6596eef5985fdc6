"""What a step costs, learned from the steps before it.

    budget.decode(), budget.allow(), budget.chunk()     while the step is planned (step_budget.py)
    costs.observe(budget.work, seconds)                 when it has been computed

A machine without a clock: its caller measures. A step's seconds are taken for a sum over five kinds
of work, and what each kind costs is followed by a Kalman filter (R. E. Kalman, 1960). A step says
the more of a cost the larger its part of the step was, and the less was known of it.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StepWork:
    """What one step computes."""

    forwards: int = 0  # one for all decodes, one for each chunk of a prompt
    decode_rows: int = 0
    decode_keys: int = 0  # positions that the decodes attend to, over all rows
    prompt_tokens: int = 0
    prompt_keys: int = 0  # positions that the prompts' tokens attend to, over all tokens


_PRIOR = np.array([16e-3, 1e-3, 2e-6, 1e-3, 5e-7])
"""Seconds of one of each kind, in StepWork's order, before any was measured: about what 27 M
parameters take on two cores. The first step corrects them all by one factor; their ratios are left.
"""

_TOKEN, _KEY = 3, 4  # of prompts
_DIAGONAL = np.diag_indices(len(_PRIOR))

_COMMON_VARIANCE, _OWN_VARIANCE = 100.0, 4.0
"""Of the factors by which the prior is wrong: one that all costs share, and one of each."""

_FORGETTING = 0.02
"""The share of what is known of a cost that goes stale with each step that has such work."""

_DOUBT = 0.5
"""The standard deviation of a cost of which all is stale, as a share of the cost."""

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
        self._factors = np.ones_like(_PRIOR)
        self._covariance = _COMMON_VARIANCE + _OWN_VARIANCE * np.eye(len(_PRIOR))
        self._spread = 0.1

    @property
    def spread(self) -> float:
        """The standard deviation of a step's seconds, as a share of the prediction."""
        return self._spread

    def seconds(self, work: StepWork) -> float:
        """The prediction."""
        return float(_parts(work) @ self._factors)

    def prompt_seconds(self, start: int, n_tokens: int) -> float:
        """What so many tokens of a prompt take from a position on, but for their forwards."""
        keys = n_tokens * start + n_tokens * (n_tokens + 1) // 2
        return self.seconds(StepWork(prompt_tokens=n_tokens, prompt_keys=keys))

    def chunk_tokens(self, start: int, seconds: float, wanted: int) -> int:
        """How many of `wanted` tokens from position `start` of a prompt these seconds compute.

        n tokens take n * token + (n * start + n * (n + 1) / 2) * key seconds. Their forward is not
        counted.
        """
        token = float(_PRIOR[_TOKEN] * self._factors[_TOKEN])
        key = float(_PRIOR[_KEY] * self._factors[_KEY])
        linear = token + key * (start + 0.5)
        divisor = linear + math.sqrt(linear * linear + 2 * key * seconds)
        return wanted if divisor * wanted <= 2 * seconds else int(2 * seconds / divisor)

    def observe(self, work: StepWork, seconds: float) -> None:
        """A step of at least one forward has taken so long."""
        parts = _parts(work)
        predicted = float(parts @ self._factors)
        self._forget(parts, predicted)
        size = max(predicted, seconds, _LEAST_SECONDS)
        informed = self._covariance @ parts
        variance = float(parts @ informed) + (self._spread * size) ** 2
        most = _MOST_DEVIATIONS * math.sqrt(variance)
        surprise = min(max(seconds - predicted, -most), most)
        self._factors = np.maximum(self._factors + informed * (surprise / variance), 0.0)
        self._covariance -= informed * informed[:, np.newaxis] / variance
        self._note_spread(abs(surprise) / size)

    def _forget(self, parts: Vector, predicted: float) -> None:
        """Bring the costs of this work a little nearer to being unknown, and to being unrelated.

        So they can follow a machine whose speed changes, and no run of steps, however long, makes
        the filter sure of what it says nothing of, or doubt it without bound.
        """
        stale = _FORGETTING * (parts > 0)
        kept = np.sqrt(1 - stale)
        least = _LEAST_FACTOR * predicted / float(parts.sum())
        doubt = _DOUBT * np.maximum(self._factors, least)
        self._covariance *= kept * kept[:, np.newaxis]
        self._covariance[_DIAGONAL] += stale * doubt * doubt

    def _note_spread(self, deviation: float) -> None:
        # Of a normal distribution the mean deviation is 0.8 standard deviations.
        spread = self._spread + _SPREAD_SHARE * (1.25 * deviation - self._spread)
        self._spread = min(max(spread, _LEAST_SPREAD), _MOST_SPREAD)


def _parts(work: StepWork) -> Vector:
    """The seconds of each kind of work by the prior."""
    counts = (
        work.forwards,
        work.decode_rows,
        work.decode_keys,
        work.prompt_tokens,
        work.prompt_keys,
    )
    return _PRIOR * counts
