"""How fast the queue moves."""

from collections import deque

WINDOW = 16
"""Departures that are looked back on."""


class QueuePace:
    """Seconds between the latest departures from the queue, on a clock that its caller reads.

    That time alone counts in which somebody waits: a quiet night tells nothing of the next burst.
    """

    def __init__(self) -> None:
        self._waiting = 0
        self._read_seconds = 0.0  # of the caller's clock, when last told
        self._waited_seconds = 0.0  # in which somebody waited
        self._departures = deque([0.0], maxlen=WINDOW + 1)  # in waited seconds, behind a beginning

    def joined(self, n: int, now: float) -> None:
        self._read(now)
        self._waiting += n

    def left(self, now: float) -> None:
        self._read(now)
        self._waiting -= 1
        self._departures.append(self._waited_seconds)

    def seconds_until_left(self, n: int, now: float) -> float:
        """The time that n departures take if they go on as the last ones did, until now."""
        self._read(now)
        n_departures = max(len(self._departures) - 1, 1)
        return n * (self._waited_seconds - self._departures[0]) / n_departures

    def _read(self, now: float) -> None:
        if self._waiting:
            self._waited_seconds += now - self._read_seconds
        self._read_seconds = now
