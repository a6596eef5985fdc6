"""Begins the speculation of each sequence, and remembers what sequences have generated."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from operator import mul
from typing import Protocol

from engine.drafts.sources import Answers, Draft, Drafter, Forced
from engine.drafts.suffix_index import SortedText
from engine.values.request import Request
from engine.values.stats import DraftSource
from kvstore.store import KVStore
from kvstore.tokens import Tokens
from kvstore.types import Namespace

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


class DraftMaker(Protocol):
    """Makes the drafts of one sequence."""

    def accept(self, token_id: int) -> None:
        """The token has been generated."""
        ...

    def draft(self, most: int) -> Draft | None:
        """What may follow now, at most so many tokens. Changes nothing."""
        ...


class Speculation:
    """Expects nothing: for sequences that are not drafted. This base class is the interface."""

    def accept(self, token_id: int) -> None:
        """The token has been generated."""

    def chances(self, ahead: int, most: int) -> Sequence[float]:
        """The chances of the next tokens that are expected, at most so many, behind `ahead` tokens
        that are not known yet: that each and all before it, these included, come as expected.
        """
        return ()

    def draft(self, most: int) -> Draft | None:
        """What to verify next, at most so many tokens, one at least."""
        return None


NO_SPECULATION = Speculation()


MOST_PATIENCE = 16
"""Tokens from one attempt to make a draft to the next, where none could be made for a while: an
attempt in vain takes longer than all else of a row that is planned. Each attempt in vain makes it a
token more, so it takes 136 tokens of which nothing was known to come so far.
"""


class LiveSpeculation(Speculation):
    """Compares each token with the one that was expected, whether or not that is verified.

    A draft is followed until a token differs or none is left; then another is made. While none can
    be made the attempts grow rarer, to one in `patience` tokens; 0: they do not.
    """

    def __init__(
        self, drafter: DraftMaker, rates: SequenceRates, patience: int = MOST_PATIENCE
    ) -> None:
        self._drafter = drafter
        self._rates = rates
        self._patience = patience
        self._n_vain = 0  # attempts since the last draft, as far as they matter
        self._n_waited = 0  # tokens that come before the next
        self._expected: Draft | None = None
        self._n_right = 0  # tokens of the expected draft that have come true

    def accept(self, token_id: int) -> None:
        self._drafter.accept(token_id)
        self._n_waited -= self._n_waited > 0
        expected = self._expected
        if expected is None:
            return
        is_right = expected.tokens[self._n_right] == token_id
        self._rates.note(expected, self._n_right, is_right)
        self._n_right += 1
        if not is_right or self._n_right == len(expected.tokens):
            self._expected = None

    def chances(self, ahead: int, most: int) -> Sequence[float]:
        if self._expected is None and self._n_waited == 0:
            self._expect()
        expected = self._expected
        if expected is None:
            return ()
        end = min(self._n_right + ahead + most, len(expected.tokens))
        return self._rates.chances(expected, self._n_right, end)[ahead:]

    def draft(self, most: int) -> Draft | None:
        """Made anew where tokens have come since: more is known than when the last one was."""
        if self._n_right or self._expected is None:
            self._expect()
        return self._expected and self._expected.shortened(most)

    def _expect(self) -> None:
        self._expected = self._drafter.draft(MOST_DRAFT_TOKENS)
        self._n_right = 0
        self._n_vain = 0 if self._expected else min(self._n_vain + 1, self._patience)
        self._n_waited = self._n_vain


class Speculator:
    """Drafts nothing: what `--speculate off` uses. This base class is the interface."""

    def begin(
        self, request: Request, namespace: Namespace, tokens: Tokens, forced: Forced
    ) -> Speculation:
        """The speculation of one of the request's sequences, of which `tokens` are the prompt, and
        which has no choice but to go on with what is `forced`.
        """
        return NO_SPECULATION

    def ended(self, namespace: Namespace, tokens: Tokens, prompt_tokens: int) -> None:
        """A sequence has ended: what it has generated stands behind so many tokens."""

    def clear(self, namespace: Namespace | None = None) -> None:
        """Forget what the sequences of a namespace have generated, or of all."""


NO_SPECULATOR = Speculator()

INDEXED_TOKENS = 1 << 15
"""Of a prompt, its last ones: they are sorted between two steps, in some milliseconds."""


class LiveSpeculator(Speculator):
    """Drafts from the tree of `store`, and from what sequences say. Engine thread only."""

    def __init__(self, store: KVStore) -> None:
        self._store = store
        self._answers = Answers()
        self._rates = AcceptanceRates()
        self._prompt: tuple[str, SortedText] = "", SortedText()  # of the latest request

    def begin(
        self, request: Request, namespace: Namespace, tokens: Tokens, forced: Forced
    ) -> Speculation:
        if not request.speculate or request.max_tokens <= 1:
            return NO_SPECULATION
        if self._prompt[0] != request.id:
            self._prompt = request.id, SortedText(request.prompt[-INDEXED_TOKENS:])
        drafter = Drafter(
            self._prompt[1],
            request.prediction,
            partial(self._store.continuation, namespace, tokens),
            partial(self._answers.propose, namespace),
            forced,
        )
        is_guided = request.constraint is not None or request.thinking_budget is not None
        patience = 0 if is_guided else MOST_PATIENCE  # what is forced comes and goes
        return LiveSpeculation(drafter, SequenceRates(self._rates), patience)

    def ended(self, namespace: Namespace, tokens: Tokens, prompt_tokens: int) -> None:
        self._answers.add(namespace, tokens.ids(prompt_tokens, len(tokens)))

    def clear(self, namespace: Namespace | None = None) -> None:
        self._answers.clear(namespace)
