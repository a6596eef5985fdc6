"""A draft: tokens that a sequence may generate next, to be verified in one forward."""

from dataclasses import dataclass, replace
from enum import StrEnum


class DraftSource(StrEnum):
    """Where a draft comes from."""

    GRAMMAR = "grammar"  # a guide allows no other continuation
    PREDICTION = "prediction"  # the request's own
    TREE = "tree"  # what was cached behind the same tokens
    OWN = "own"  # the request's prompt and output, where they repeat
    ANSWERS = "answers"  # other outputs of the namespace


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
