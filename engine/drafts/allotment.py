"""Chooses the drafts that pay: those that give more tokens a second, and sometimes one to learn
their cost.
"""

from bisect import bisect_left
from collections.abc import Sequence
from operator import neg
from typing import NamedTuple

MIN_GAIN = 1.03
"""Drafts must multiply a step's tokens a second by this, since estimates are not exact."""


class DraftableRow(NamedTuple):
    """A row with a draft. `chances[i]` is the chance that its first i + 1 tokens are right, so
    chances fall. Verifying takes `token_seconds` for each token and `seconds` in addition.
    """

    chances: Sequence[float]
    seconds: float
    token_seconds: float


class StepPrice(NamedTuple):
    """The cost of a step. Without drafts it gives `n_tokens` in `seconds`. Verifying drafts takes
    `verify_seconds` more. All drafts together may take `most_seconds` and have `most_tokens`.
    """

    n_tokens: int
    seconds: float
    verify_seconds: float
    most_seconds: float
    most_tokens: int


def allot(rows: Sequence[DraftableRow], price: StepPrice) -> list[int]:
    """Return for each row how many tokens of its draft to verify; all 0 if drafts do not pay.

    A draft token pays if it gives more tokens a second than the step does without it. The chosen
    tokens raise the step's rate, so the choice is made again with the higher rate.
    """
    value = price.n_tokens / price.seconds
    counts, gained = _choose(rows, price, value)
    if gained > value:
        counts, gained = _choose(rows, price, gained)
    return counts if gained >= MIN_GAIN * value else [0] * len(rows)


def _choose(
    rows: Sequence[DraftableRow], price: StepPrice, value: float
) -> tuple[list[int], float]:
    """Choose for each row how many tokens to verify: as many as fit, best first, that give more
    than `value` tokens a second. Return the counts and the tokens a second of the step.
    """
    counts = [_n_worth(row, value) for row in rows]
    left_seconds = price.most_seconds - price.verify_seconds
    tokens, seconds = _totals(rows, counts)
    if sum(counts) > price.most_tokens or seconds > left_seconds:
        counts = _best(rows, counts, price.most_tokens, left_seconds)
        tokens, seconds = _totals(rows, counts)
    if not any(counts):
        return counts, price.n_tokens / price.seconds
    seconds += price.seconds + price.verify_seconds
    return counts, (price.n_tokens + tokens) / seconds


def _n_worth(row: DraftableRow, value: float) -> int:
    """Count the row's tokens that pay; 0 if together they do not pay for `row.seconds` as well."""
    least = value * row.token_seconds
    count = bisect_left(row.chances, -least, key=neg)
    return count if sum(row.chances[:count]) - count * least > value * row.seconds else 0


def _best(
    rows: Sequence[DraftableRow], wanted: Sequence[int], left_tokens: int, left_seconds: float
) -> list[int]:
    """Choose among the wanted tokens the ones that give the most a second, as many as fit."""
    counts = [0] * len(rows)
    by_gain = sorted(
        (-chance / row.token_seconds, index)
        for index, row in enumerate(rows)
        for chance in row.chances[: wanted[index]]
    )
    for _, index in by_gain:
        seconds = rows[index].token_seconds + (0.0 if counts[index] else rows[index].seconds)
        if left_tokens == 0 or seconds > left_seconds:
            break
        counts[index] += 1
        left_tokens -= 1
        left_seconds -= seconds
    return counts


def _totals(rows: Sequence[DraftableRow], counts: Sequence[int]) -> tuple[float, float]:
    """The expected tokens and the seconds of these counts of draft tokens."""
    tokens = seconds = 0.0
    for row, count in zip(rows, counts, strict=True):
        if count:
            tokens += sum(row.chances[:count])
            seconds += row.seconds + count * row.token_seconds
    return tokens, seconds


_MIN_GAP, _MAX_GAP = 4, 512
"""Steps from one probe to the next. The gap doubles with each probe until a draft pays."""

_PROBE_TOKENS = 8
"""The most draft tokens of a probe: enough to learn the cost of a token and that of verifying."""


class Probes:
    """Sometimes verifies a draft that does not pay, if it is expected to give a token.

    Otherwise a cost that was once learned too high would end all drafts for good: in the first step
    of a new shape a kernel may be compiled.
    """

    def __init__(self) -> None:
        self._gap = self._left_steps = _MIN_GAP

    def count_step(self) -> None:
        """Count a planned step."""
        self._left_steps = max(self._left_steps - 1, 0)

    def paid(self) -> None:
        """Start again with the smallest gap, because drafts pay."""
        self._gap = self._left_steps = _MIN_GAP

    def is_due(self, rows: Sequence[DraftableRow]) -> bool:
        """Whether to verify a draft of these rows, none of which pays."""
        return self._left_steps == 0 and max(map(_gain, rows)) >= 1

    def take(self, rows: Sequence[DraftableRow], most_tokens: int) -> list[int]:
        """Return for each row how many tokens to verify: some of the best row if a probe is due."""
        counts = [0] * len(rows)
        if self.is_due(rows):
            self._gap = self._left_steps = min(2 * self._gap, _MAX_GAP)
            best = max(range(len(rows)), key=lambda index: _gain(rows[index]))
            counts[best] = min(len(rows[best].chances), _PROBE_TOKENS, most_tokens)
        return counts


def _gain(row: DraftableRow) -> float:
    """The number of tokens that a probe of the row is expected to give."""
    return sum(row.chances[:_PROBE_TOKENS])
