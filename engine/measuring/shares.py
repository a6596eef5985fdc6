"""A time that is shared out over sections: what one leaves, those that come have."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

Clock: TypeAlias = Callable[[], float]
"""Seconds from any beginning."""


class Shares:
    """Up to `end`, by the clock. `weights`: of the sections, in the order in which they come."""

    def __init__(self, end: float, weights: Sequence[float], clock: Clock) -> None:
        self._clock = clock
        self._end = end
        self._weights = list(weights)

    def next_end(self) -> float:
        """Until when the next section may go on, by the clock."""
        share = self._weights[0] / sum(self._weights)
        del self._weights[0]
        now = self._clock()
        return now + share * max(self._end - now, 0)
