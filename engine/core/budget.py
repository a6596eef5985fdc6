"""Predicts a step's time from earlier steps, and decides how many prompt tokens it has time for."""

import math
from bisect import bisect_left, bisect_right
from typing import NamedTuple


class StepShape(NamedTuple):
    """The work of a step, which determines its time. All decodes share one forward, which drafts
    widen. Each chunk of a prompt has a forward of its own.
    """

    decode_rows: int = 0
    decode_keys: int = 0  # positions that the decodes attend to, over all rows
    chunks: tuple[tuple[int, int], ...] = ()  # start and tokens of each
    drafts: tuple[tuple[int, int], ...] = ()  # position of the row's own token, draft tokens
    scored_tokens: int = 0  # of the chunks: the log-probability of the next one is computed
    listed_rows: int = 0  # of the decodes: the request wants log-probabilities of their tokens
    pooled_chunks: int = 0  # hidden states of their tokens are pooled
    stage_tokens: int = 0  # of each stage of a vision tower, the tokens of its image
    draft_forwards: int = 0  # of the draft model, one after another
    draft_rows: int = 0  # of all these forwards together
    draft_known: int = 0  # known tokens that the draft model computes in the first of them

    @property
    def decodes(self) -> "StepShape":
        """The decodes alone."""
        return StepShape(self.decode_rows, self.decode_keys, listed_rows=self.listed_rows)


_FIRST_STEPS = 3
"""If one of the first steps takes less than half of its prediction, the steps before it are
discarded: they compile kernels, and touch memory for the first time.
"""

_FIRST_WIDTH = 8  # each octave of a table beyond this width has a factor of its own

_FIRST_VARIANCE, _SHAPE_VARIANCE = 4.0, 0.25  # relative, of costs that were never measured
_FORGETTING, _COMMON_DOUBT, _OWN_DOUBT = 0.02, 0.02, 0.005
"""Each observation moves the variances by this share towards these doubts. So costs can follow a
machine that changes, and steps do not make the model sure of costs that they do not measure. Most
doubt is common to all costs: a machine changes its speed, and rarely the ratio of two costs.
"""

_USUAL_SQUARE, _MOST_EXCESS, _JUMP_DOUBT = 4.0, 5.0, 0.005
"""A surprise beyond two standard deviations (squared: 4) adds to the doubt of the common factor. A
machine that slows down surprises at once; a cost that was learned wrong surprises gradually.
"""

_LEAST_FACTOR = 0.25  # a cost is corrected as if it were at least this share of the prior
_MOST_FALL = 0.5  # of a cost, by one observation
_MOST_DEVIATIONS = 3.0  # a surprise counts for at most this many: it may be a pause
_SPREAD_SHARE = 0.05  # of the latest step in the spread
_LEAST_SPREAD, _MOST_SPREAD = 0.03, 0.5
_LEAST_SECONDS = 1e-6  # a divisor if a test's clock stands still


class _Cost:
    """Seconds of one unit of work before the common factor, and their relative variance."""

    __slots__ = ("least", "seconds", "variance")

    def __init__(self, seconds: float, variance: float = _FIRST_VARIANCE) -> None:
        self.seconds, self.variance, self.least = seconds, variance, _LEAST_FACTOR * seconds


_Parts = list[tuple[_Cost, float]]  # costs, each with how many units of it a step has


class _Table:
    """Seconds by width: the seconds of a token, and a factor on them for each octave beyond
    _FIRST_WIDTH. So the seconds never fall with the width, and the seconds of one width are the
    first guess for all others.
    """

    def __init__(self, token_seconds: float) -> None:
        self.token = _Cost(token_seconds)
        self._octaves = [(_FIRST_WIDTH << n, _Cost(1.0, _SHAPE_VARIANCE)) for n in range(24)]

    def weighted(self, width: int) -> float:
        """The width, with each octave in it multiplied by its factor."""
        weighted: float = min(width, _FIRST_WIDTH)
        for start, factor in self._octaves:
            if width <= start:
                break
            weighted += factor.seconds * (min(width, 2 * start) - start)
        return weighted

    def shapes(self, width: int) -> _Parts:
        """The octaves' factors, each with the seconds that it multiplies."""
        parts = _Parts()
        for start, factor in self._octaves:
            if width <= start:
                break
            parts.append((factor, self.token.seconds * (min(width, 2 * start) - start)))
        return parts


class StepCosts:
    """Predicts the seconds of a step, and learns from the steps that were measured.

    The time of a forward is a base, plus seconds by its width from a table, plus seconds for the
    keys that it reads. Decodes have a table of their own, because each row samples. All costs share
    one factor: the machine's speed.
    """

    def __init__(self, draft_share: float = 1.0) -> None:
        """`draft_share`: what a forward of the draft model takes of one of the model, until both
        were measured.
        """
        self.spread = 0.1  # standard deviation of a step's seconds, as a share of the prediction
        self._factor, self._variance = 1.0, _FIRST_VARIANCE
        self._n_observed = 0
        # Costs before any step was measured: about those of 27 M parameters on two CPU cores. The
        # first step scales them all, so only ratios matter, until steps with such work were seen.
        self._forward = _Cost(20e-3)
        self._rows, self._tokens = _Table(1e-3), _Table(0.7e-3)
        self._decode_key = _Cost(2e-6)
        self._key = _Cost(3e-7)  # for each token of a chunk that attends to it
        self._gather = _Cost(6e-6)  # of a key, once for each chunk
        self._verify = _Cost(2e-3)
        self._draft_token = _Cost(0.7e-3)
        self._score = _Cost(1e-3)
        self._listed = _Cost(3e-4)
        self._pooled = _Cost(1e-4)
        self._stage = _Cost(1e-4)  # for each token of the image
        self._draft_forward = _Cost(20e-3 * draft_share)
        self._draft_row = _Cost(1e-3 * draft_share)
        self._draft_known = _Cost(0.7e-3 * draft_share)

    def predict(self, shape: StepShape) -> float:
        """Predict the seconds of a step."""
        return self._factor * max(_total(self._parts(shape)), 0.0)

    def begin_seconds(self, start: int) -> float:
        """Seconds of a prompt's chunk from `start` on that its length does not affect."""
        return self._factor * self._forward.seconds + self.gather_seconds(start)

    def gather_seconds(self, n_keys: int) -> float:
        """Seconds to gather the keys and values of `n_keys` positions for a chunk."""
        return self._factor * self._gather.seconds * n_keys

    def prompt_seconds(self, start: int, n_tokens: int, n_scored: int = 0) -> float:
        """Seconds of `n_tokens` prompt tokens from `start` on, `n_scored` of which are scored,
        without `begin_seconds`.
        """
        seconds = self._tokens.token.seconds * self._tokens.weighted(n_tokens)
        seconds += self._score.seconds * n_scored
        seconds += self._gather.seconds * n_tokens + self._key.seconds * _attended(start, n_tokens)
        return self._factor * seconds

    def stage_seconds(self, n_tokens: int) -> float:
        """Seconds of a stage of a vision tower, for an image of `n_tokens` tokens."""
        return self._factor * self._stage.seconds * n_tokens

    def verify_seconds(self) -> float:
        """Seconds that any drafts add to a step: it is collected before the next is planned."""
        return self._factor * self._verify.seconds

    def draft_seconds(self, start: int, n_tokens: int) -> float:
        """Seconds that `n_tokens` draft tokens add to the decode of the token at position `start`.
        The keys are gathered for all of them, in place of the decode's own.
        """
        return self._factor * _total(self._draft_parts(start, n_tokens))

    def draft_model_seconds(self, n_forwards: int, n_rows: int, n_known: int = 0) -> float:
        """Seconds of `n_forwards` forwards of the draft model with `n_rows` rows in all, which
        compute `n_known` known tokens as well.
        """
        seconds = self._draft_forward.seconds * n_forwards + self._draft_row.seconds * n_rows
        return self._factor * (seconds + self._draft_known.seconds * n_known)

    def tokens_within(self, seconds: float, start: int, wanted: int, scored: float = 0.0) -> int:
        """How many of `wanted` prompt tokens from `start` on take at most `seconds`, without
        `begin_seconds`: all of them, or else one of eight lengths in each octave. `scored` is the
        share of the tokens that are scored.

        MLX reuses buffers of the same size, and memory that is touched for the first time costs a
        page fault for each 4 KiB: a quarter of a step's time, if chunks may have any length.
        """

        def taken_seconds(n_tokens: int) -> float:
            return self.prompt_seconds(start, n_tokens, math.ceil(scored * n_tokens))

        if taken_seconds(wanted) <= seconds:
            return wanted
        shorter = range(1, bisect_left(range(8 * wanted.bit_length()), wanted, key=_length))
        return _length(bisect_right(shorter, seconds, key=lambda n: taken_seconds(_length(n))))

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Learn from a step of at least one forward or stage that took `seconds`.

        A Kalman filter without covariances: the surprise is divided among the common factor and the
        costs of this work, in proportion to what each adds to the variance of the prediction
        (docs/internals/scheduler.md).
        """
        parts, factor, seconds = self._parts(shape), self._factor, max(seconds, _LEAST_SECONDS)
        predicted = max(factor * _total(parts), _LEAST_SECONDS)
        self._n_observed += 1
        if self._n_observed == 1 or (self._n_observed <= _FIRST_STEPS and seconds < predicted / 2):
            self._factor *= seconds / predicted
            return

        if shape.chunks or shape.decode_rows > _FIRST_WIDTH:
            parts += self._rows.shapes(shape.decode_rows)
            for _, n_tokens in shape.chunks:
                parts += self._tokens.shapes(n_tokens)
        size = predicted if predicted > seconds else seconds
        common = self._variance + _FORGETTING * (_COMMON_DOUBT - self._variance)
        noise = (self.spread * size) ** 2
        variance = noise + common * predicted * predicted
        moves = []
        for cost, count in parts:
            unit = cost.seconds
            if unit < cost.least:  # noqa: PLR1730 (max takes three times as long)
                unit = cost.least
            part = factor * count * unit
            cost.variance += _FORGETTING * (_OWN_DOUBT - cost.variance)
            own = cost.variance * part
            variance += own * part
            moves.append((cost, unit, own, own * part))
        surprise = seconds - predicted
        excess = surprise * surprise / variance - _USUAL_SQUARE
        if excess > 0.0:
            doubt = _JUMP_DOUBT * min(excess, _MOST_EXCESS)
            common += doubt
            variance += doubt * predicted * predicted
            most = _MOST_DEVIATIONS * math.sqrt(variance)
            surprise = min(max(surprise, -most), most)
        share = surprise / variance
        for cost, unit, own, known in moves:
            cost.variance *= 1 - known / variance
            moved = cost.seconds + max(own * share, -_MOST_FALL) * unit
            cost.seconds = moved if moved > 0.0 else 0.0
        self._factor = factor * max(1 + common * predicted * share, 1 - _MOST_FALL)
        self._variance = common - (common * predicted) ** 2 / variance
        # The mean deviation of a normal distribution is 0.8 standard deviations. If costs are in
        # doubt, less of the surprise is noise.
        deviation = 1.25 * abs(surprise) / size
        spread = self.spread + _SPREAD_SHARE * math.sqrt(noise / variance) * (
            deviation - self.spread
        )
        self.spread = min(max(spread, _LEAST_SPREAD), _MOST_SPREAD)

    def _parts(self, shape: StepShape) -> _Parts:
        """The costs of a step's work, without the octaves' factors."""
        rows, keys, chunks, drafts, scored_tokens, listed_rows, pooled_chunks, stages, *of_draft = (
            shape
        )
        parts = _Parts()
        if rows:
            tokens = rows if rows <= _FIRST_WIDTH else self._rows.weighted(rows)
            parts = [(self._forward, 1), (self._rows.token, tokens), (self._decode_key, keys)]
        if chunks:
            parts[:1] = [(self._forward, len(chunks) + (rows > 0))]
            for start, n_tokens in chunks:
                parts.append((self._tokens.token, self._tokens.weighted(n_tokens)))
                parts.append((self._key, _attended(start, n_tokens)))
                parts.append((self._gather, start + n_tokens))
        if scored_tokens:
            parts.append((self._score, scored_tokens))
        if listed_rows:
            parts.append((self._listed, listed_rows))
        if pooled_chunks:
            parts.append((self._pooled, pooled_chunks))
        if stages:
            parts.append((self._stage, stages))
        if drafts:
            parts.append((self._verify, 1))
            for start, n_tokens in drafts:
                parts += self._draft_parts(start, n_tokens)
        if shape.draft_forwards:
            of_model = self._draft_forward, self._draft_row, self._draft_known
            parts += zip(of_model, of_draft, strict=True)
        return parts

    def _draft_parts(self, start: int, n_tokens: int) -> _Parts:
        """The costs that a draft adds to the decode of the token at position `start`."""
        return [
            (self._draft_token, n_tokens),
            (self._key, _attended(start, 1 + n_tokens)),
            (self._gather, start + 1 + n_tokens),
            (self._decode_key, -start - 1),
        ]


def _total(parts: _Parts) -> float:
    """Seconds of these costs, before the common factor."""
    seconds = 0.0
    for cost, count in parts:
        seconds += cost.seconds * count
    return seconds


def _attended(start: int, n_tokens: int) -> int:
    """The number of positions that a chunk's tokens attend to, over all tokens."""
    return n_tokens * start + n_tokens * (n_tokens + 1) // 2


def _length(index: int) -> int:
    """The lengths 0, 1, 2, ..., 15, 16, 18, ..., 30, 32, 36, ...: eight in each octave."""
    return index if index < 16 else (8 + index % 8) << (index // 8 - 1)


_MARGIN_DEVIATIONS = 2.0
"""Standard deviations by which a step is planned to end before its limit."""

_LEAST_SHARE = 0.25
"""The share of the rest of the step's time that the tokens of its first chunk may always take."""

_TRANSFER_SHARE = 0.5
"""The share of the rest of the step's time that transfers from and to the disk may take: a gap
between two tokens grows by half at most.
"""


class StepBudget:
    """The time of one step while it is planned: first its decodes, then chunks of prompts.

    A step with decodes is planned to end within `stretch` times the time of its decodes alone, less
    a margin that 2% of normal prediction errors exceed. So the limit scales with the model's speed.
    Without decodes there is no limit but for tokens that are scored: they take no longer than
    `step_tokens` would that are not, since who comes next waits for the step.

    Every prompt goes on: the first chunk of a step has at least one token, and may always take a
    quarter of the time of the decodes and a forward, or the time of gathering the keys before it.
    Otherwise a long prompt would spend its time on gathering the same keys again and again. Stages
    of images are a chunk in this sense.
    """

    shape = StepShape()  # the work added so far

    def __init__(
        self,
        costs: StepCosts,
        stretch: float,
        batch_rows: int = 0,
        step_tokens: int | None = None,
    ) -> None:
        """`stretch` is at least 1 and may be infinite. The limit is that of `batch_rows` decodes if
        the step has fewer: rows whose prompts are being prefilled will decode as well, and
        a few decodes wait longer if many prompts wait. A step has at most `step_tokens`.
        """
        self._costs = costs
        self._stretch = stretch
        self._batch_rows = batch_rows
        self._step_tokens = step_tokens
        self._transfer_seconds = 0.0

    def add_decodes(self, n_rows: int, n_keys: int, n_listed: int = 0) -> None:
        """Add `n_rows` decodes, which attend to `n_keys` positions in all. Of the tokens of
        `n_listed` of them the request wants log-probabilities.
        """
        shape = self.shape
        self.shape = shape._replace(
            decode_rows=shape.decode_rows + n_rows,
            decode_keys=shape.decode_keys + n_keys,
            listed_rows=shape.listed_rows + n_listed,
        )

    def add_chunk(
        self, start: int, n_tokens: int, n_scored: int = 0, *, is_pooled: bool = False
    ) -> None:
        """Add a chunk of a prompt, positions [start, start + n_tokens), `n_scored` of which are
        scored.
        """
        shape = self.shape
        self.shape = shape._replace(
            chunks=(*shape.chunks, (start, n_tokens)),
            scored_tokens=shape.scored_tokens + n_scored,
            pooled_chunks=shape.pooled_chunks + is_pooled,
        )

    def add_stages(self, n_tokens: int, n_stages: int) -> None:
        """Add stages of a vision tower, for an image of `n_tokens` tokens."""
        stage_tokens = self.shape.stage_tokens + n_tokens * n_stages
        self.shape = self.shape._replace(stage_tokens=stage_tokens)

    @property
    def has_prompts(self) -> bool:
        """Whether the step has chunks of prompts or stages of images already."""
        return bool(self.shape.chunks or self.shape.stage_tokens)

    def add_draft(self, start: int, n_tokens: int) -> None:
        """Add `n_tokens` draft tokens to the row that decodes the token at position `start`."""
        self.shape = self.shape._replace(drafts=(*self.shape.drafts, (start, n_tokens)))

    def add_draft_model(self, n_forwards: int, n_rows: int, n_known: int) -> None:
        """Add forwards of the draft model; see `StepCosts.draft_model_seconds`."""
        self.shape = self.shape._replace(
            draft_forwards=n_forwards, draft_rows=n_rows, draft_known=n_known
        )

    def add_transfer(self, seconds: float) -> None:
        """Add a transfer of bytes that is predicted to take `seconds`."""
        self._transfer_seconds += seconds

    @property
    def decode_seconds(self) -> float:
        """Predicted seconds of the decodes alone."""
        return self._costs.predict(self.shape.decodes)

    @property
    def left_seconds(self) -> float:
        """Seconds of work that may still be added to the decodes."""
        return max(self._aim_seconds - self._spent_seconds, 0.0)

    @property
    def transfer_seconds(self) -> float:
        """How long transfers may take in addition to the work so far; infinite without decodes."""
        if self.shape.decode_rows == 0:
            return math.inf
        step_seconds = self._costs.predict(self.shape)
        most_seconds = min(self._aim_seconds - step_seconds, _TRANSFER_SHARE * step_seconds)
        return max(most_seconds - self._transfer_seconds, 0.0)

    def chunk_tokens(self, start: int, wanted: int, scored: float = 0.0) -> int:
        """The number of the `wanted` prompt tokens from position `start` on that may join the step;
        a share of `scored` of them is scored.

        At least one may, unless the step has a chunk already and the tokens that fit would take
        less time than the base cost of a chunk.
        """
        if math.isinf(self._stretch):
            return wanted
        costs = self._costs
        begin_seconds = costs.begin_seconds(start)
        spent_seconds = self._spent_seconds
        aim_seconds = self._aim_seconds
        if self.shape.decode_rows == 0:
            if scored == 0.0 or self._step_tokens is None:
                return wanted
            aim_seconds = begin_seconds + costs.prompt_seconds(start, self._step_tokens)
        left_seconds = aim_seconds - spent_seconds - begin_seconds
        if self.has_prompts:
            n_tokens = costs.tokens_within(max(left_seconds, 0.0), start, wanted, scored)
            return n_tokens if n_tokens == wanted or left_seconds >= begin_seconds else 0
        gather_seconds = costs.gather_seconds(start)
        least_seconds = _LEAST_SHARE * (spent_seconds + begin_seconds - gather_seconds)
        seconds = max(left_seconds, least_seconds, gather_seconds)
        return max(costs.tokens_within(seconds, start, wanted, scored), 1)

    def stages(self, n_tokens: int, wanted: int) -> int:
        """The number of `wanted` stages of a vision tower that may join the step, for an image of
        `n_tokens` tokens. At least one may, unless the step has chunks or stages already.
        """
        if math.isinf(self._stretch) or self.shape.decode_rows == 0:
            return wanted
        spent_seconds = self._spent_seconds
        seconds, least = max(self._aim_seconds - spent_seconds, 0.0), 0
        if not self.has_prompts:
            seconds, least = max(seconds, _LEAST_SHARE * spent_seconds), 1
        fitting = seconds / max(self._costs.stage_seconds(n_tokens), _LEAST_SECONDS)
        return min(wanted, max(int(fitting), least))

    @property
    def _spent_seconds(self) -> float:
        return self._costs.predict(self.shape) + self._transfer_seconds

    @property
    def _aim_seconds(self) -> float:
        if math.isinf(self._stretch):
            return math.inf
        decodes = self.shape.decodes
        decodes = decodes._replace(decode_rows=max(decodes.decode_rows, self._batch_rows))
        limit_seconds = self._stretch * self._costs.predict(decodes)
        return limit_seconds / (1 + _MARGIN_DEVIATIONS * self._costs.spread)
