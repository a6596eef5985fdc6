"""A draft: tokens that a sequence may generate next, to be verified in one forward."""

from dataclasses import dataclass, replace

from engine.types.draft import DraftSource


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
