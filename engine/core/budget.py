"""What a step costs, learned from earlier steps, and how many prompt tokens it has time for."""

import math
from collections.abc import Sequence
from operator import mul

from engine.core.step import (
    VERIFICATION,
    StepWork,
    chunk_beginning,
    chunk_work,
    draft_work,
)

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


_MARGIN_DEVIATIONS = 2.0
"""Standard deviations by which a step is planned to end before its limit."""

_LEAST_SHARE = 0.25
"""What the tokens of a step's first chunk may take, of what all else in the step takes."""

_MOVED_SHARE = 0.5
"""What moving bytes from and to the disk may take, of what all else in the step does: so that a gap
between two tokens grows by half at most."""


class StepBudget:
    """The time of one step, while it is planned: first its decodes, then chunks of prompts.

    Beside decodes all is to end within `stretch` times what a step of decodes alone takes, with a
    margin for errors of prediction: of normal ones 2% go beyond it. So a slow model behaves as a
    fast one does in slow motion. Without decodes nobody waits for a next token, and time has no
    limit.

    So that every prompt goes on, the tokens of a step's first chunk are one at least, and may take
    a quarter of what decodes and a forward do, whatever is left, or as long as it takes to gather
    what lies before them: else a long prompt's time would be spent on gathering it again.
    """

    def __init__(self, costs: StepCosts, stretch: float, batch_rows: int = 0) -> None:
        """`stretch` is at least 1 and may be infinite. The step of decodes that counts has
        `batch_rows`, if those are more than the decodes: who waits for a prompt will decode, too,
        and where many wait for few, they wait for longer.
        """
        self._costs = costs
        self._stretch = stretch
        self._batch_rows = batch_rows
        self._n_chunks = 0
        self._decode_rows = 0
        self._decode_keys = 0
        self._chunks_and_drafts = StepWork()
        self._moved_seconds = 0.0

    @property
    def moving_seconds(self) -> float:
        """How long bytes may be moved beside what has been planned; infinite without decodes."""
        if self._decode_rows == 0:
            return math.inf
        work_seconds = self._costs.seconds(self.work)
        most_seconds = min(self._aim_seconds - work_seconds, _MOVED_SHARE * work_seconds)
        return max(most_seconds - self._moved_seconds, 0.0)

    @property
    def _spent_seconds(self) -> float:
        return self._costs.seconds(self.work) + self._moved_seconds

    @property
    def work(self) -> StepWork:
        """What has been planned."""
        return self._chunks_and_drafts.plus(self.decodes)

    @property
    def decodes(self) -> StepWork:
        """What of it is decodes."""
        return StepWork(min(self._decode_rows, 1), self._decode_rows, self._decode_keys)

    @property
    def left_seconds(self) -> float:
        """What may still be planned beside the decodes."""
        return max(self._aim_seconds - self._spent_seconds, 0.0)

    def decode(self, start: int) -> None:
        """One token of a sequence, at position `start`, is in the step."""
        self._decode_rows += 1
        self._decode_keys += start + 1

    def chunk(self, start: int, n_tokens: int) -> None:
        """Positions [start, start + n_tokens) of a prompt are in the step."""
        self._n_chunks += 1
        self._chunks_and_drafts = self._chunks_and_drafts.plus(chunk_work(start, n_tokens))

    def draft(self, start: int, n_tokens: int) -> None:
        """The sequence that decodes the token at position `start` has a draft of so many tokens."""
        if self._chunks_and_drafts.verifications == 0:
            self._chunks_and_drafts = self._chunks_and_drafts.plus(VERIFICATION)
        self._chunks_and_drafts = self._chunks_and_drafts.plus(draft_work(start, n_tokens))

    def move(self, seconds: float) -> None:
        """Bytes are filled in that are predicted to take so long."""
        self._moved_seconds += seconds

    def allow(self, start: int, wanted: int) -> int:
        """How many of `wanted` tokens, at least one, from position `start` of a prompt may join.

        0 only where another chunk is in the step: what fits takes less time than to begin it does.
        """
        if self._decode_rows == 0 or math.isinf(self._stretch):
            return wanted
        begin_seconds = self._costs.seconds(chunk_beginning(start))
        spent_seconds = self._spent_seconds
        left_seconds = self._aim_seconds - spent_seconds - begin_seconds
        if self._n_chunks == 0:
            gather_seconds = self._costs.seconds(StepWork(gathered_keys=start))
            with_forward = spent_seconds + begin_seconds - gather_seconds
            seconds = max(left_seconds, _LEAST_SHARE * with_forward, gather_seconds)
            return max(_usual(self._costs.chunk_tokens(start, seconds, wanted), wanted), 1)
        allowed = _usual(self._costs.chunk_tokens(start, max(left_seconds, 0.0), wanted), wanted)
        return allowed if allowed == wanted or left_seconds >= begin_seconds else 0

    @property
    def _aim_seconds(self) -> float:
        if math.isinf(self._stretch):
            return math.inf
        rows = max(self._decode_rows, self._batch_rows)
        decodes = StepWork(forwards=1, decode_rows=rows, decode_keys=self._decode_keys)
        limit_seconds = self._stretch * self._costs.seconds(decodes)
        return limit_seconds / (1 + _MARGIN_DEVIATIONS * self._costs.spread)


def _usual(n_tokens: int, wanted: int) -> int:
    """All that is wanted, where that fits; else one of eight lengths in each octave.

    MLX finds its buffers again by their size, and memory that is touched for the first time costs a
    page fault for each 4 KiB: a quarter of a step's time, while each chunk had a length of its own.
    """
    if n_tokens == wanted:
        return n_tokens
    step = 1 << max(0, n_tokens.bit_length() - 4)
    return n_tokens // step * step
