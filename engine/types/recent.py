"""Cache hits of the last minutes, in intervals of ten seconds."""

from collections.abc import Iterator
from dataclasses import dataclass

INTERVAL_SECONDS = 10.0
WINDOWS_SECONDS = (60, 300, 900)
KEPT = int(WINDOWS_SECONDS[-1] / INTERVAL_SECONDS) + 1
"""One more than the longest window has, because it begins within an interval."""


@dataclass(frozen=True, slots=True)
class RecentHits:
    """Prompt tokens that were looked up in the last so many seconds, and those found."""

    seconds: int
    queried_tokens: int
    hit_tokens: int

    @property
    def share(self) -> float | None:
        """None where nothing was looked up."""
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else None


@dataclass(frozen=True, slots=True)
class HitCount:
    """Both counters, since start, at a time of the loop's clock."""

    seconds: float
    queried_tokens: int
    hit_tokens: int


START = HitCount(0.0, 0, 0)


@dataclass(frozen=True, slots=True)
class HitRecord:
    """The counters as last noted, and as they were left in each interval before.

    A value: the engine thread replaces it, and any thread reads it.
    """

    past: tuple[HitCount, ...] = ()  # oldest first, one an interval at most
    last: HitCount = START

    def noted(self, count: HitCount) -> "HitRecord":
        """A record with one more count, later than all others."""
        if count.seconds // INTERVAL_SECONDS == self.last.seconds // INTERVAL_SECONDS:
            return HitRecord(self.past, count)
        return HitRecord((*self.past[1 - KEPT :], self.last), count)

    def recent(self, now: float) -> Iterator[RecentHits]:
        """The hits of each window, which is up to an interval longer than it says."""
        for seconds in WINDOWS_SECONDS:
            before = self._at(now - seconds)
            queried = self.last.queried_tokens - before.queried_tokens
            yield RecentHits(seconds, queried, self.last.hit_tokens - before.hit_tokens)

    def _at(self, seconds: float) -> HitCount:
        """The last count from then or before. It holds until the next count."""
        counts = (*self.past, self.last)
        return next((count for count in reversed(counts) if count.seconds <= seconds), START)
