"""Drafts by somebody who knows what comes, and is wrong now and then."""

from collections.abc import Sequence
from random import Random

from engine.drafts.proposer import LiveSpeculation
from engine.drafts.sources import Draft
from engine.values.stats import DraftSource


class Overconfident(LiveSpeculation):
    """Whatever it expects is certain: so it is verified where there is time."""

    def chances(self, ahead: int, most: int) -> Sequence[float]:
        return [1.0] * len(super().chances(ahead, most))


class Oracle:
    """Drafts what a sequence will generate. Each token is wrong with a chance of `error`."""

    def __init__(self, truth: Sequence[int], random: Random, error: float, vocab_size: int) -> None:
        self._truth = truth
        self._random = random
        self._error = error
        self._vocab_size = vocab_size
        self._n_generated = 0

    def accept(self, token_id: int) -> None:
        self._n_generated += 1

    def draft(self, most: int) -> Draft | None:
        """Of any length, perhaps beyond the end."""
        random = self._random
        n_tokens = random.choice([0, 1, 2, 5, most])
        ahead = self._truth[self._n_generated : self._n_generated + n_tokens]
        tokens = [*ahead, *[0] * (n_tokens - len(ahead))]
        for at in range(n_tokens):
            if random.random() < self._error:
                tokens[at] = random.randrange(self._vocab_size)
        return Draft(tuple(tokens), random.choice(list(DraftSource))) if tokens else None
