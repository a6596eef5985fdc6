"""How often drafts come true, by what is known of them beforehand."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from engine.drafts.draft import Draft
from engine.types.draft import DraftSource

MOST_DRAFT_TOKENS = 32
"""Of one row, in one step."""

_MEMORY_TOKENS = 64.0
"""Of the latest tokens compared, so many make a rate."""

_OWN_MEMORY_TOKENS = 16.0
_COMMON_WEIGHT = 4.0
"""A sequence's own rate weighs what it has compared of these tokens, the common one so many."""

_MOST_BITS = 6
_MOST_MATCHED = 1 << _MOST_BITS - 1
"""The number of matching tokens from which on more make no difference."""

_BITS = tuple(n.bit_length() for n in range(_MOST_MATCHED)) + (_MOST_BITS,) * MOST_DRAFT_TOKENS
"""By the number of tokens that match, how many bits it has: `_BITS[n : n + k]` is of k draft tokens
behind n that match, for n up to _MOST_MATCHED.
"""

_FIRST_GUESS = {
    DraftSource.GRAMMAR: 0.9,
    DraftSource.PREDICTION: 0.8,
    DraftSource.TREE: 0.8,
    DraftSource.OWN: 0.6,
    DraftSource.ANSWERS: 0.5,
}
"""Before any was compared. It costs a few drafts if it is wrong."""


@dataclass(slots=True)
class Rate:
    """The share of tokens that came true, of the latest `memory` ones."""

    memory: float
    share: float = 0.0
    n_compared: float = 0.0

    def note(self, is_right: bool) -> None:
        self.n_compared = min(self.n_compared + 1, self.memory)
        self.share += (is_right - self.share) / self.n_compared


class AcceptanceRates:
    """How often a draft's token is right where all before it were, by the draft's source and by how
    many tokens before it match: so by its position in the draft, too.

    What was drafted and not verified is compared, too, so no draft has to be tried to be known.
    """

    def __init__(self) -> None:
        self._rates = {
            source: [Rate(_MEMORY_TOKENS, guess, _COMMON_WEIGHT) for _ in range(_MOST_BITS + 1)]
            for source, guess in _FIRST_GUESS.items()
        }

    def note(self, source: DraftSource, matched: int, is_right: bool) -> None:
        """A drafted token behind so many that match has been compared with the one that came."""
        self._rates[source][_bits(matched)].note(is_right)

    def shares(self, source: DraftSource) -> list[float]:
        """By how many bits the number of tokens that match has."""
        return [rate.share for rate in self._rates[source]]


class SequenceRates:
    """The same for one sequence, which may repeat itself more or less than others do."""

    def __init__(self, common: AcceptanceRates) -> None:
        self._common = common
        self._own: dict[DraftSource, Rate] = defaultdict(lambda: Rate(_OWN_MEMORY_TOKENS))

    def note(self, draft: Draft, position: int, is_right: bool) -> None:
        """The token that has come at this position of the draft, behind right ones, is as drafted,
        or another.
        """
        self._common.note(draft.source, draft.matched + position, is_right)
        self._own[draft.source].note(is_right)

    def chances(self, draft: Draft, position: int, end: int) -> Sequence[float]:
        """For each of the draft's tokens from `position` to `end`: the chance that it and all from
        there on are right.
        """
        own = self._own[draft.source]
        own_weight = own.n_compared / (own.n_compared + _COMMON_WEIGHT)
        shares = [
            own_weight * own.share + (1 - own_weight) * common
            for common in self._common.shares(draft.source)
        ]
        first = min(draft.matched + position, _MOST_MATCHED)
        return list(
            accumulate((shares[bits] for bits in _BITS[first : first + end - position]), mul)
        )


def _bits(matched: int) -> int:
    return _BITS[min(matched, _MOST_MATCHED)]
