"""Drafts that are mostly right, because the output is known."""

from collections.abc import Sequence
from random import Random

from engine.drafts.proposer import Proposer
from engine.drafts.sources import Draft
from engine.values.stats import DraftSource


class Overconfident(Proposer):
    """Is certain of every draft, so drafts are verified where there is time."""

    def chances(self, n_unknown: int, most: int) -> Sequence[float]:
        return [1.0] * len(super().chances(n_unknown, most))


class Oracle:
    """Drafts what a sequence will generate. Each token is wrong with a chance of `error`."""

    def __init__(self, truth: Sequence[int], random: Random, error: float, vocab_size: int) -> None:
        self._truth = truth
        self._random = random
        self._error = error
        self._vocab_size = vocab_size

    def __call__(self, output: Sequence[int], most: int) -> Draft | None:
        """Draft any number of tokens, perhaps beyond the end of the output."""
        random = self._random
        n_tokens = random.choice([0, 1, 2, 5, most])
        ahead = self._truth[len(output) : len(output) + n_tokens]
        tokens = [*ahead, *[0] * (n_tokens - len(ahead))]
        for at in range(n_tokens):
            if random.random() < self._error:
                tokens[at] = random.randrange(self._vocab_size)
        return Draft(tuple(tokens), 0, random.choice(list(DraftSource))) if tokens else None
