"""The draft that is expected for one sequence, and how likely its tokens are."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import TypeAlias

from engine.drafts.sources import Draft, ModelText
from engine.values.stats import DraftSource

MAX_DRAFT_TOKENS = 32  # of one row, in one step

MAX_BACKOFF = 16
"""The most tokens between two attempts to make a draft. A failed attempt takes longer than planning
the rest of a row, so each makes the gap one token longer: it is largest after 136 tokens without a
draft.
"""

_MEMORY_TOKENS, _OWN_MEMORY_TOKENS = 64.0, 16.0  # of the common rates, of a sequence's own
_COMMON_WEIGHT = 4.0  # the common rates weigh as much as this many tokens of the sequence

_MAX_BITS = 6
_MAX_MATCHED = 1 << _MAX_BITS - 1  # longer matches count as equal
_BITS = tuple(n.bit_length() for n in range(_MAX_MATCHED)) + (_MAX_BITS,) * MAX_DRAFT_TOKENS
"""Bit lengths of match lengths: `_BITS[n : n + k]` is for k draft tokens after a match of n."""

_FIRST_SHARES = {
    DraftSource.GRAMMAR: 0.9,
    DraftSource.PREDICTION: 0.8,
    DraftSource.TREE: 0.8,
    DraftSource.OWN: 0.6,
    DraftSource.ANSWERS: 0.5,
    DraftSource.MODEL: 0.7,
}  # assumed before any token was compared: a wrong one costs a few drafts


@dataclass(slots=True)
class Rate:
    """The share of drafted tokens that were right, among about `memory_tokens` of the latest."""

    memory_tokens: float
    share: float = 0.0
    n_compared: float = 0.0

    def note(self, is_right: bool) -> None:
        if self.n_compared < self.memory_tokens:
            self.n_compared += 1
        self.share += (is_right - self.share) / self.n_compared


AcceptanceRates: TypeAlias = dict[DraftSource, list[Rate]]
"""How often a drafted token is right if all before it were: by the draft's source, and by the bit
length of the number of matching tokens before it, which grows with its position in the draft.
"""


def first_rates() -> AcceptanceRates:
    """Return rates for sequences to share and to learn, before any token was compared."""
    return {
        source: [Rate(_MEMORY_TOKENS, share, _COMMON_WEIGHT) for _ in range(_MAX_BITS + 1)]
        for source, share in _FIRST_SHARES.items()
    }


MakeDraft: TypeAlias = Callable[[Sequence[int], int], Draft | None]
"""Drafts at most `n` tokens after an output."""


class Proposer:
    """Keeps an expected draft for one sequence and compares it with the generated tokens, whether
    or not the draft is verified. So acceptance rates are known without verifying drafts.

    A draft is expected until a token differs or none is left; then the next attempt to make one
    `is_due`. While none can be made, attempts back off to one in `max_backoff` tokens; with 0 they
    do not. A planner skips the sequence while there are `backoff_tokens`.
    """

    def __init__(
        self,
        make_draft: MakeDraft,
        rates: AcceptanceRates,
        max_backoff: int = MAX_BACKOFF,
        model: ModelText | None = None,
    ) -> None:
        """`rates` are shared by all sequences. The sequence's own rates are shrunk towards them.
        `model` is the source of the draft model's tokens, if there is one.
        """
        self.backoff_tokens = 0  # until the next attempt; 0: it is due, or a draft is expected
        self._make_draft = make_draft
        self._max_backoff = max_backoff
        self._model = model
        self._output: list[int] = []
        self._n_misses = 0  # failed attempts since the last draft, up to `max_backoff`
        self._rates = rates
        self._own_rates: dict[DraftSource, Rate] = defaultdict(lambda: Rate(_OWN_MEMORY_TOKENS))
        self._expected: Draft | None = None
        self._n_right = 0  # tokens of the expected draft that were generated
        self._common: list[Rate] = []  # of the expected draft's source
        self._own = Rate(_OWN_MEMORY_TOKENS)
        self._bits: tuple[int, ...] = ()  # index in `_common` for each token of the expected draft
        self._chances: list[float] | None = None  # of its tokens from `_n_right` on

    def accept(self, token_id: int) -> None:
        """Take a token that the sequence has generated."""
        self._output.append(token_id)
        expected = self._expected
        if expected is None:
            if self.backoff_tokens:
                self.backoff_tokens -= 1
            return
        n_right = self._n_right
        is_right = expected.tokens[n_right] == token_id
        self._common[self._bits[n_right]].note(is_right)
        self._own.note(is_right)
        self._n_right, self._chances = n_right + 1, None
        if not is_right or n_right + 1 == len(expected.tokens):
            self._expected = None

    @property
    def is_due(self) -> bool:
        """Whether no draft is expected and an attempt to make one is due."""
        return self._expected is None and not self.backoff_tokens

    @property
    def is_outdated(self) -> bool:
        """Whether tokens of the expected draft were generated, so that its sources know more."""
        return self._n_right > 0

    def chances(self, n_unknown: int, most: int) -> Sequence[float]:
        """Return the chances of up to `most` expected tokens, after `n_unknown` tokens that are not
        sampled yet. Each is the chance that this token and all before it are right.
        """
        if self._expected is None:
            return ()
        if self._chances is None:
            bits = self._bits[self._n_right :]
            self._chances = _chances(self._own, self._common, bits)
        return self._chances[n_unknown : n_unknown + most]

    @property
    def n_expected_elsewhere(self) -> int:
        """The number of tokens that are expected next by a source other than the draft model."""
        if self._expected is None or self._expected.source is DraftSource.MODEL:
            return 0
        return len(self._expected.tokens) - self._n_right

    def model_chances(self, most: int) -> Sequence[float]:
        """Return the chances of the next `most` tokens that the draft model would draft."""
        source = DraftSource.MODEL
        return _chances(self._own_rates[source], self._rates[source], _BITS[:most])

    def continued(self, n_sampled: int, tokens: Sequence[int]) -> None:
        """Take the draft model's tokens. They follow the next `n_sampled` tokens of the output. An
        attempt to make a draft is due then.
        """
        if self._model is not None:
            self._model.take(tuple(tokens), len(self._output) + n_sampled)
            self.backoff_tokens = 0

    def draft(self, most: int) -> Draft | None:
        """Return up to `most` expected tokens, to be verified next."""
        if self._expected is None:
            return None
        tokens, matched, source = self._expected
        n_right = self._n_right
        return Draft(tokens[n_right : n_right + most], matched + n_right, source)

    def attempt(self) -> None:
        """Try to make a draft, in place of the expected one if there is one. Back off if none can
        be made.
        """
        self._expected = draft = self._make_draft(self._output, MAX_DRAFT_TOKENS)
        self._n_right, self._chances = 0, None
        if draft is None:
            self._n_misses = min(self._n_misses + 1, self._max_backoff)
        else:
            self._n_misses = 0
            self._common, self._own = self._rates[draft.source], self._own_rates[draft.source]
            first = min(draft.matched, _MAX_MATCHED)
            self._bits = _BITS[first : first + len(draft.tokens)]
        self.backoff_tokens = self._n_misses


def _chances(own: Rate, common: Sequence[Rate], bits: Sequence[int]) -> list[float]:
    """The chances of tokens with these bit lengths, each together with all before it."""
    weight = own.n_compared / (own.n_compared + _COMMON_WEIGHT)
    own_share, common_weight = weight * own.share, 1 - weight
    shares = [own_share + common_weight * rate.share for rate in common]
    return list(accumulate(map(shares.__getitem__, bits), mul))
