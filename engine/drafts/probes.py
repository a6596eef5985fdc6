"""Drafts that are verified now and then although they would not pay."""

from collections.abc import Sequence

from engine.drafts.allotment import DraftableRow

_LEAST_GAP, _MOST_GAP = 4, 512
"""Steps from one probe to the next: twice as many each time, as long as no draft pays."""

_MOST_TOKENS = 8
"""Of a probe: enough to tell what a token takes from what verifying takes."""


class Probes:
    """Keeps a cost that was learned too high once from ending all drafts: what is not done is not
    learned anew. A first step of a new shape may compile a kernel.

    A probe is a draft that would give a token more if verifying were free.
    """

    def __init__(self) -> None:
        self._gap = _LEAST_GAP
        self._left = _LEAST_GAP

    def step(self) -> None:
        """Another step is planned."""
        self._left -= self._left > 0

    def paid(self) -> None:
        """Drafts are verified because they pay."""
        self._gap = self._left = _LEAST_GAP

    def is_due(self, rows: Sequence[DraftableRow]) -> bool:
        """Whether to verify a draft of these rows, of which none pays."""
        return self._left == 0 and max(map(_gain, rows)) >= 1

    def take(self, rows: Sequence[DraftableRow], most_tokens: int) -> list[int]:
        """For each row the number of its draft's tokens to verify: a few of the likeliest one's,
        where a probe is due.
        """
        counts = [0] * len(rows)
        if self.is_due(rows):
            self._gap = self._left = min(2 * self._gap, _MOST_GAP)
            best = max(range(len(rows)), key=lambda index: _gain(rows[index]))
            counts[best] = min(len(rows[best].chances), _MOST_TOKENS, most_tokens)
        return counts


def _gain(row: DraftableRow) -> float:
    """Tokens that the first of its draft are expected to give."""
    return sum(row.chances[:_MOST_TOKENS])
