"""One sequence's drafts: what is expected of it next, and how often that comes true."""

from collections.abc import Sequence
from typing import Protocol

from engine.drafts.acceptance import MOST_DRAFT_TOKENS, SequenceRates
from engine.drafts.draft import Draft


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
