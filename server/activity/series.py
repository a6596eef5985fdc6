"""The figures of the last quarter of an hour, as the dashboard draws them."""

import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import islice

from anyio import current_time, sleep

from engine.types.statistics import EngineStats
from server.schemas.admin import SeriesPoint

KEPT_SECONDS = 900.0
N_POINTS = 300
"""A chart is some 200 to 400 pixels wide: more points would share pixels."""

INTERVAL_SECONDS = KEPT_SECONDS / N_POINTS


@dataclass(frozen=True, slots=True)
class _Counted:
    """The counters that points are made of, at a time of the clock."""

    seconds: float
    generated_tokens: int
    computed_tokens: int
    cached_tokens: int
    first_tokens: int
    first_token_seconds: float
    evictions: int


class SeriesRecord:
    """N_POINTS, one each INTERVAL_SECONDS."""

    def __init__(
        self,
        clock: Callable[[], float] = current_time,
        epoch_seconds: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self._epoch_seconds = epoch_seconds
        self._last: _Counted | None = None
        self._points = deque[SeriesPoint](maxlen=N_POINTS)
        self._n_points = 0

    @property
    def n_points(self) -> int:
        """That there have been, those included that are no longer kept."""
        return self._n_points

    def points(self, after: int = 0) -> list[SeriesPoint]:
        """The oldest first, without the first `after` that there have been."""
        n_old = max(after - (self._n_points - len(self._points)), 0)
        return list(islice(self._points, n_old, None))

    async def run(self, stats: Callable[[], Awaitable[EngineStats]]) -> None:
        """Add what `stats` says, until cancelled."""
        while True:
            self.add(await stats())
            await sleep(INTERVAL_SECONDS)

    def add(self, stats: EngineStats) -> None:
        """Of now; the first time there is nothing yet to compare with."""
        counted = _counted(stats, self._clock())
        if self._last is not None and counted.seconds > self._last.seconds:
            self._points.append(self._point(self._last, counted, stats))
            self._n_points += 1
        self._last = counted

    def _point(self, last: _Counted, now: _Counted, stats: EngineStats) -> SeriesPoint:
        seconds = now.seconds - last.seconds
        computed = now.computed_tokens - last.computed_tokens
        cached = now.cached_tokens - last.cached_tokens
        prompt = computed + cached
        first_tokens = now.first_tokens - last.first_tokens
        waited_seconds = now.first_token_seconds - last.first_token_seconds
        return SeriesPoint(
            time=self._epoch_seconds(),
            generated_tokens_per_second=(now.generated_tokens - last.generated_tokens) / seconds,
            prompt_tokens_per_second=prompt / seconds,
            computed_tokens_per_second=computed / seconds,
            hit_share=cached / prompt if prompt else None,
            first_token_seconds=waited_seconds / first_tokens if first_tokens else None,
            evicted_blocks_per_second=(now.evictions - last.evictions) / seconds,
            running=stats.loop.running,
            waiting=stats.loop.waiting,
        )


def _counted(stats: EngineStats, seconds: float) -> _Counted:
    loop = stats.loop
    return _Counted(
        seconds=seconds,
        generated_tokens=loop.generated_tokens,
        computed_tokens=loop.computed_prompt_tokens,
        cached_tokens=loop.cached_prompt_tokens,
        first_tokens=loop.first_tokens,
        first_token_seconds=loop.first_token_seconds,
        evictions=loop.cache.evictions,
    )
