"""How many draft tokens of each row are verified in a step: as many as pay."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from operator import neg

_LEAST_GAIN = 1.03
"""Drafts are verified where a step then gives so many times as many tokens a second: what is known
of chances and costs is no more exact.
"""


@dataclass(frozen=True, slots=True)
class DraftableRow:
    """A row with a draft. `chances[i]`: that its first i + 1 tokens are all right, so they fall. A
    draft takes `token_seconds` for each of its tokens, and `seconds` beside these.
    """

    chances: Sequence[float]
    seconds: float
    token_seconds: float


@dataclass(frozen=True, slots=True)
class StepPrice:
    """A step without drafts gives `n_tokens` in `seconds`. Verifying any takes `verify_seconds`
    more. All drafts together may take `most_seconds` and have `most_tokens`.
    """

    n_tokens: int
    seconds: float
    verify_seconds: float
    most_seconds: float
    most_tokens: int


def allot(rows: Sequence[DraftableRow], price: StepPrice) -> list[int]:
    """For each row the number of its draft's tokens to verify; all 0 where that does not pay.

    A draft token pays where it gives more tokens a second than the step does without it. The better
    the step, the more is asked of each token: so it is asked twice.
    """
    value = price.n_tokens / price.seconds
    counts = _worth(rows, price, value)
    gained = _value(rows, price, counts)
    if gained > value:
        counts = _worth(rows, price, gained)
        gained = _value(rows, price, counts)
    return counts if gained >= _LEAST_GAIN * value else [0] * len(rows)


def _worth(rows: Sequence[DraftableRow], price: StepPrice, value: float) -> list[int]:
    """The tokens that give more than `value` tokens a second, the best first, as many as fit."""
    counts = [_n_worth(row, value) for row in rows]
    left_seconds = price.most_seconds - price.verify_seconds
    if sum(counts) <= price.most_tokens and _draft_seconds(rows, counts) <= left_seconds:
        return counts
    return _best(rows, counts, price.most_tokens, left_seconds)


def _n_worth(row: DraftableRow, value: float) -> int:
    """How many of the row's tokens pay, if they also pay for what its draft takes beside them."""
    least = value * row.token_seconds
    count = bisect_left(row.chances, -least, key=neg)
    return count if sum(row.chances[:count]) - count * least > value * row.seconds else 0


def _best(
    rows: Sequence[DraftableRow], wanted: Sequence[int], left_tokens: int, left_seconds: float
) -> list[int]:
    """Of so many tokens of each row those that give the most a second, as many as fit."""
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


def _value(rows: Sequence[DraftableRow], price: StepPrice, counts: Sequence[int]) -> float:
    """Tokens a second of a step with so many draft tokens of each row."""
    if not any(counts):
        return price.n_tokens / price.seconds
    gained = sum(sum(row.chances[:count]) for row, count in zip(rows, counts, strict=True))
    seconds = price.seconds + price.verify_seconds + _draft_seconds(rows, counts)
    return (price.n_tokens + gained) / seconds


def _draft_seconds(rows: Sequence[DraftableRow], counts: Sequence[int]) -> float:
    """What so many draft tokens of each row take."""
    return sum(
        row.seconds + count * row.token_seconds
        for row, count in zip(rows, counts, strict=True)
        if count
    )
