"""What a sequence may generate next, from whichever source knows something first."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

from engine.drafts.draft import Draft
from engine.drafts.prediction import Prediction
from engine.drafts.suffix_index import Proposal, SortedText, SuffixIndex
from engine.types.draft import DraftSource

TokenIds: TypeAlias = tuple[int, ...]

Forced: TypeAlias = Callable[[], TokenIds]
"""What must follow a sequence's tokens now, as far as there is no choice."""

TREE_TOKENS = 512
"""How far the tree is looked up at a time."""
LOOKUP_TOKENS = 16
"""Tokens from one look into the tree to the next, where there is nothing to follow."""


class Drafter:
    """Drafts one sequence's next tokens. Nothing is indexed before the first draft.

    Sources are asked in order, and the first that has anything is taken: the request's prediction,
    what is cached behind the same tokens, the sequence's own text, other answers. Where a guide
    leaves no choice, a draft that goes on from there is taken, or else these tokens are.
    """

    def __init__(
        self,
        prompt: SortedText,
        prediction: TokenIds,
        known: Callable[[int], TokenIds],
        answers: Callable[[Sequence[int], int], Proposal],
        forced: Forced,
    ) -> None:
        """`known`: up to so many tokens that are cached behind all tokens of the sequence.
        `answers`: what followed these tokens in other answers, up to so many.
        """
        self._forced = forced
        self._prompt = prompt
        self._output = list[int]()
        self._known = known
        self._answers = answers
        self._own: SuffixIndex | None = None
        self._prediction = Prediction(prediction)
        self._in_tree = _Trail()
        self._next_lookup = 0  # at so many tokens of output
        self._sources = (
            (DraftSource.PREDICTION, self._from_prediction),
            (DraftSource.TREE, self._from_tree),
            (DraftSource.OWN, self._from_own),
            (DraftSource.ANSWERS, self._from_answers),
        )

    def accept(self, token_id: int) -> None:
        """The sequence has generated this token."""
        self._output.append(token_id)
        self._prediction.accept(self._output)
        self._in_tree.accept(token_id)

    def draft(self, most: int) -> Draft | None:
        """Up to `most` tokens that may come next. Asked twice, it gives the same."""
        if most < 1:
            return None
        forced = self._forced()[:most]
        for source, propose in self._sources:
            found = propose(most)
            if found.tokens and _goes_on(found.tokens, forced):
                return Draft(found.tokens, source, found.matched)
        return Draft(forced, DraftSource.GRAMMAR) if forced else None

    def _from_prediction(self, most: int) -> Proposal:
        return self._prediction.propose(self._output, most)

    def _from_tree(self, most: int) -> Proposal:
        ahead = self._in_tree.ahead(most)
        if ahead.tokens or len(self._output) < self._next_lookup:
            return ahead
        self._next_lookup = len(self._output) + LOOKUP_TOKENS
        self._in_tree = _Trail(self._known(TREE_TOKENS))
        return self._in_tree.ahead(most)

    def _from_own(self, most: int) -> Proposal:
        if self._own is None:
            self._own = SuffixIndex(self._prompt)
        self._own.extend(self._output[len(self._own) - len(self._prompt.ids) :])
        return self._own.continue_itself(most).likely

    def _from_answers(self, most: int) -> Proposal:
        return self._answers(self._output, most).likely


class _Trail:
    """Tokens that are followed as long as those that come are the same."""

    def __init__(self, tokens: TokenIds = ()) -> None:
        self._tokens = tokens
        self._at = 0

    def accept(self, token_id: int) -> None:
        if self._tokens[self._at : self._at + 1] == (token_id,):
            self._at += 1
        else:
            self._at = len(self._tokens)

    def ahead(self, most: int) -> Proposal:
        return Proposal(self._tokens[self._at : self._at + most], self._at)


def _goes_on(tokens: TokenIds, forced: TokenIds) -> bool:
    """Whether they begin as they must, and say more than that."""
    return not forced or (len(tokens) > len(forced) and tokens[: len(forced)] == forced)
