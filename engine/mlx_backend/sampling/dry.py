"""DRY ("don't repeat yourself"), as llama.cpp defines it: a token that would continue a repetition
of the text's end loses the more, the longer the repetition is.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from engine.values.request import Dry

Tokens: TypeAlias = npt.NDArray[np.uint32]
Lengths: TypeAlias = npt.NDArray[np.int32]

MOST_REPEATED = 256
"""Repetitions count as at most this long, or `allowed_length` where that is more: a penalty of
1.75^254 rules a token out, and so does one of 1.1^254."""

LARGEST_PENALTY = 1e30
"""Above any logit, and finite in float32."""


class DryRule:
    """The parameters of one request, and its breakers by their first and by their last tokens."""

    def __init__(self, params: Dry) -> None:
        self.params = params
        self.most_repeated = max(MOST_REPEATED, params.allowed_length)
        self.breaks_alone = frozenset(one[0] for one in params.breakers if len(one) == 1)
        self.by_first = defaultdict[int, list[tuple[int, ...]]](list)
        self.by_last = defaultdict[int, list[tuple[int, ...]]](list)
        for breaker in params.breakers:
            self.by_first[breaker[0]].append(breaker)
            self.by_last[breaker[-1]].append(breaker)

    def penalty(self, repeated: int) -> float:
        """What a token loses that continues a repetition of that many tokens."""
        beyond = repeated - self.params.allowed_length
        log = math.log(self.params.multiplier) + beyond * math.log(self.params.base)
        return math.exp(min(log, math.log(LARGEST_PENALTY)))


class DryState:
    """A text and where its end occurs in it before. Immutable, so drafts share it."""

    def __init__(self, params: Dry, text: Sequence[int] | Tokens) -> None:
        """`text`: the prompt and the output so far. Only its window is kept."""
        self._rule = DryRule(params)
        tokens = np.asarray(text, dtype=np.uint32)
        self._tokens = tokens[max(len(tokens) - self._window, 0) :]
        self._repeated = _repeated(self._tokens, self._rule.most_repeated)
        self._breaker: tuple[int, int] | None = self._last_breaker()

    def followed_by(self, token_id: int) -> "DryState":
        """The state after one more token."""
        state = object.__new__(DryState)
        state._rule = self._rule
        n_kept = min(len(self._tokens) + 1, self._window)
        # What equals the new token continues what was repeated up to the token before it.
        before = np.concatenate([_NONE, self._repeated])[: len(self._tokens)]
        longer = np.minimum(before + 1, self._rule.most_repeated)
        repeated = np.where(self._tokens == token_id, longer, 0).astype(np.int32)
        tokens = np.concatenate([self._tokens, np.array([token_id], dtype=np.uint32)])
        state._tokens = tokens[len(tokens) - n_kept :]
        state._repeated = repeated[len(tokens) - n_kept :]
        state._breaker = state._breaker_after(self._breaker, token_id)
        return state

    def penalties(self) -> Mapping[int, float]:
        """What is subtracted from the logits of tokens that may come next."""
        rule, n_tokens = self._rule, len(self._tokens)
        allowed = rule.params.allowed_length
        limit = n_tokens
        if self._breaker is not None and self._breaker[0] < n_tokens:
            limit = self._breaker[0] - self._breaker[1]
        if n_tokens <= allowed or limit < allowed:
            return {}
        in_window = np.arange(1, n_tokens, dtype=np.int32)  # each with as many tokens as it ends
        repeated = np.minimum(np.minimum(self._repeated, in_window), limit)
        places = np.flatnonzero(repeated >= allowed)
        places = places[np.argsort(repeated[places], kind="stable")]
        longest = dict(
            zip(self._tokens[places + 1].tolist(), repeated[places].tolist(), strict=True)
        )
        return {
            token: rule.penalty(length)
            for token, length in longest.items()
            if token not in rule.breaks_alone
        }

    @property
    def _window(self) -> int:
        window = self._rule.params.penalty_last_n
        return 2**31 if window < 0 else window

    def _last_breaker(self) -> tuple[int, int] | None:
        """The last token that begins a breaker: how many tokens are after it, and how many of these
        are of the longest breaker that it begins.
        """
        firsts = np.array(list(self._rule.by_first), dtype=np.uint32)
        last = len(self._tokens) - 1
        for place in np.flatnonzero(np.isin(self._tokens, firsts))[::-1].tolist():
            found = [
                len(breaker) - 1
                for breaker in self._rule.by_first[int(self._tokens[place])]
                if tuple(self._tokens[place : place + len(breaker)].tolist()) == breaker
            ]
            if found:
                return last - place, max(found)
        return None

    def _breaker_after(
        self, before: tuple[int, int] | None, token_id: int
    ) -> tuple[int, int] | None:
        """The last breaker, where `before` was the last one before the token at the end."""
        found = [] if before is None else [(before[0] + 1, before[1])]
        found += [
            (len(breaker) - 1, len(breaker) - 1)
            for breaker in self._rule.by_last.get(token_id, ())
            if tuple(self._tokens[-len(breaker) :].tolist()) == breaker
        ]
        return min(found, key=lambda one: (one[0], -one[1]), default=None)


_NONE = np.zeros(1, dtype=np.int32)


def _repeated(tokens: Tokens, most: int) -> Lengths:
    """For each token but the last: how many tokens up to it equal those at the end, at most `most`.

    Places drop out where they differ, so that a text that repeats nothing is read about once.
    """
    found = np.zeros(max(len(tokens) - 1, 0), dtype=np.int32)
    places = np.arange(len(found))
    for length in range(min(most, len(found))):
        places = places[places >= length]
        places = places[tokens[places - length] == tokens[len(tokens) - 1 - length]]
        if not len(places):
            break
        found[places] = length + 1
    return found
