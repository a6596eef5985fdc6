"""What sequences have generated lately, for others of their namespace to draft from."""

from collections.abc import Sequence
from itertools import takewhile

from engine.drafts.suffix_index import NOTHING, Proposal, SuffixIndex
from kvstore.types import Namespace

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
