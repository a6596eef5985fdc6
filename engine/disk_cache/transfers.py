"""How long a step is held up for each byte that it fills in or reads."""

import math

NEWEST_SHARE = 0.25
"""The weight of the latest step in the average."""


class BytePace:
    """A moving average of seconds a byte, learned from steps that moved bytes.

    What such a step takes once is in it by its share; so what is allowed converges to what fits,
    where the time is longer than that.
    """

    def __init__(self) -> None:
        self._byte_seconds: float | None = None

    def observe(self, n_bytes: int, seconds: float) -> None:
        """So many bytes, at least one, have held a step up for so long."""
        seen, known = seconds / n_bytes, self._byte_seconds
        self._byte_seconds = seen if known is None else known + NEWEST_SHARE * (seen - known)

    def seconds(self, n_bytes: int, unseen_rate: float | None = None) -> float:
        """The prediction for so many bytes. `unseen_rate`: bytes a second before any step was seen
        to be held up; None: nothing is known.
        """
        return n_bytes * self._per_byte(unseen_rate)

    def bytes_in(self, seconds: float, unseen_rate: float | None = None) -> float:
        """How many bytes are moved in that time; infinite where that is."""
        if math.isinf(seconds):
            return math.inf
        per_byte = self._per_byte(unseen_rate)
        return seconds / per_byte if per_byte else 0.0

    def _per_byte(self, unseen_rate: float | None) -> float:
        if self._byte_seconds:  # no time at all is less than can be measured
            return self._byte_seconds
        return 1 / unseen_rate if unseen_rate else 0.0
