"""What a sequence may generate next, from whichever source knows something first."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TypeAlias

from engine.drafts.suffix_index import NOTHING, SHORTEST, Proposal, SortedText, SuffixIndex
from engine.values.stats import DraftSource
from kvstore.types import Namespace

AHEAD_TOKENS = 512
"""How far ahead of a divergence the output may go on with the prediction: what was left out."""
_TOKEN_BYTES = array("I").itemsize


class Prediction:
    """Where an output is in what was predicted of it.

    After a divergence it goes on at the first place ahead that has the output's last three tokens:
    an edit changes few tokens between many that are kept. Until then, what followed the end of the
    output anywhere in the prediction is proposed.
    """

    def __init__(self, tokens: tuple[int, ...]) -> None:
        self._tokens = tokens
        self._packed = array("I", tokens).tobytes()
        self._text: SuffixIndex | None = None
        self._at = 0  # of the token that comes next, or of the first that did not come
        self._is_followed = True
        self._n_followed = 0  # tokens that came as predicted, without a gap

    def accept(self, output: Sequence[int]) -> None:
        """The output has got its last token."""
        if self._is_followed and self._tokens[self._at : self._at + 1] == (output[-1],):
            self._at += 1
            self._n_followed += 1
        else:
            self._is_followed = self._find(output[-SHORTEST:])
            self._n_followed = SHORTEST

    def propose(self, output: Sequence[int], most: int) -> Proposal:
        """Up to `most` tokens that may come next."""
        if self._is_followed:
            return Proposal(self._tokens[self._at : self._at + most], self._n_followed)
        if self._text is None:
            self._text = SuffixIndex(self._tokens)
        return self._text.propose(output, most).likely

    def _find(self, last: Sequence[int]) -> bool:
        """Go to the first place ahead that has these tokens. Returns whether there is one."""
        if len(last) < SHORTEST or self._at == len(self._tokens):
            return False
        packed, start = array("I", last).tobytes(), self._at * _TOKEN_BYTES
        stop = start + AHEAD_TOKENS * _TOKEN_BYTES
        found = self._packed.find(packed, start, stop)
        while found % _TOKEN_BYTES and found >= 0:  # between two tokens
            found = self._packed.find(packed, found + 1, stop)
        if found < 0:
            return False
        self._at = found // _TOKEN_BYTES + SHORTEST
        return True


MOST_TOKENS = 1 << 17
"""Of all namespaces together: some 15 MB."""
_END = (1 << 32) - 1
"""Stands behind each answer: no token has this id, so that none is found across it."""


class Answers:
    """The latest answers of each namespace: no more than `most_tokens` of all together.

    They are kept in two generations. When the new one has half of the tokens it becomes the old
    one, and what was the old one is forgotten.
    """

    def __init__(self, most_tokens: int = MOST_TOKENS) -> None:
        self._generation_tokens = most_tokens // 2
        self._new = _Generation()
        self._old = _Generation()

    def __len__(self) -> int:
        """Tokens, with one for the end of each answer."""
        return self._new.n_tokens + self._old.n_tokens

    def add(self, namespace: Namespace, tokens: Sequence[int]) -> None:
        """Remember an answer; of one that is longer than a generation, the end."""
        kept = tokens[max(len(tokens) + 1 - self._generation_tokens, 0) :]
        if not kept:
            return
        if self._new.n_tokens + len(kept) + 1 > self._generation_tokens:
            self._new, self._old = _Generation(), self._new
        self._new.add(namespace, kept)

    def propose(self, namespace: Namespace, last: Sequence[int], most: int) -> Proposal:
        """What followed the end of `last` in an answer of the namespace; see SuffixIndex.propose.

        Of equally long occurrences those of the new generation come first.
        """
        generations = (self._new, self._old)
        found = [each.propose(namespace, last, most) for each in generations]
        return max(found, key=lambda proposal: proposal.matched)

    def clear(self, namespace: Namespace | None = None) -> None:
        """Forget the answers of one namespace, or all."""
        if namespace is None:
            self._new, self._old = _Generation(), _Generation()
        else:
            self._new.clear(namespace)
            self._old.clear(namespace)


class _Generation:
    """Answers that are forgotten together."""

    def __init__(self) -> None:
        self.n_tokens = 0
        self._texts: dict[Namespace, SuffixIndex] = {}

    def add(self, namespace: Namespace, tokens: Sequence[int]) -> None:
        text = self._texts.setdefault(namespace, SuffixIndex())
        text.extend(tokens)
        text.append(_END)
        self.n_tokens += len(tokens) + 1

    def propose(self, namespace: Namespace, last: Sequence[int], most: int) -> Proposal:
        text = self._texts.get(namespace)
        if text is None:
            return NOTHING
        found = text.propose(last, most)
        tokens = tuple(takewhile(lambda token_id: token_id != _END, found.tokens))
        return Proposal(tokens, found.matched) if tokens else NOTHING

    def clear(self, namespace: Namespace) -> None:
        if (text := self._texts.pop(namespace, None)) is not None:
            self.n_tokens -= len(text)


@dataclass(frozen=True, slots=True)
class Draft:
    """At least one token, and what they were taken from.

    `matched`: how many tokens before them are the same there, as far as that was looked at.
    """

    tokens: tuple[int, ...]
    source: DraftSource
    matched: int = 0

    def shortened(self, most: int) -> "Draft":
        """Its first tokens, at most so many."""
        return self if len(self.tokens) <= most else replace(self, tokens=self.tokens[:most])


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
