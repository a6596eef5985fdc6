"""The last picture of a daemon, and its rates over the last seconds."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from engine.values.tree import TreeCounters
from server.schemas.cache_tree import CacheTree

WINDOW_SECONDS = 5.0
LEAST_SECONDS = 1.0  # before that a rate is mostly chance


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens a second over the last few seconds."""

    computed: float  # of prompts
    cached: float
    generated: float


@dataclass(frozen=True, slots=True)
class Seen:
    """What is drawn. `rates` is None where there is one picture alone."""

    picture: CacheTree
    age_seconds: float  # how long ago that was
    rates: Rates | None


_Count = tuple[float, TreeCounters]
"""When, by the clock, and what had been counted."""


class Watch:
    """Written by one thread and read by another: its state is replaced as a whole.

    No picture comes while nothing changes, so rates then fall with time.
    """

    def __init__(self, first: CacheTree, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: tuple[CacheTree, tuple[_Count, ...]] = (first, ((clock(), first.counters),))

    def take(self, picture: CacheTree) -> None:
        now = self._clock()
        _, counts = self._known
        self._known = (picture, (*_since(now - WINDOW_SECONDS, counts), (now, picture.counters)))

    def seen(self) -> Seen:
        now = self._clock()
        picture, counts = self._known
        (since, first), *_ = _since(now - WINDOW_SECONDS, counts)
        seconds = min(max(now - since, LEAST_SECONDS), WINDOW_SECONDS)
        return Seen(picture, now - counts[-1][0], _rates(first, picture.counters, seconds))


def _since(seconds: float, counts: tuple[_Count, ...]) -> tuple[_Count, ...]:
    """The counts since that time, beginning with the last one before."""
    n_older = sum(at <= seconds for at, _ in counts)
    return counts[max(0, n_older - 1) :]


def _rates(first: TreeCounters, last: TreeCounters, seconds: float) -> Rates:
    """The rates between two counts, at least 0: a restarted daemon counts from 0 again."""
    prompt = max(0, last.prompt_tokens - first.prompt_tokens)
    cached = min(prompt, max(0, last.cached_tokens - first.cached_tokens))
    generated = max(0, last.generated_tokens - first.generated_tokens)
    return Rates((prompt - cached) / seconds, cached / seconds, generated / seconds)
