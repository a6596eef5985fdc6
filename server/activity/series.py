"""The figures of the last quarter of an hour, as the dashboard draws them."""

import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from anyio import current_time, sleep

from engine.values.stats import EngineStats, LoopStats
from server.schemas.admin import SeriesPoint

KEPT_SECONDS = 900.0
N_POINTS = 300
"""A chart is some 200 to 400 pixels wide: more points would share pixels."""

INTERVAL_SECONDS = KEPT_SECONDS / N_POINTS


log = logging.getLogger("rootstock.activity")


class _Counted(NamedTuple):
    """The counters that points are made of."""

    generated_tokens: float
    computed_tokens: float
    cached_tokens: float
    first_tokens: float
    first_token_seconds: float
    evictions: float


_NOTHING = _Counted(0, 0, 0, 0, 0, 0)


class SeriesRecord:
    """N_POINTS, one each INTERVAL_SECONDS."""

    def __init__(
        self,
        clock: Callable[[], float] = current_time,
        epoch_seconds: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self._epoch_seconds = epoch_seconds
        self._last: Mapping[str, _Counted] | None = None
        self._last_seconds = 0.0
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

    async def run(self, stats: Callable[[], Awaitable[Mapping[str, EngineStats]]]) -> None:
        """Add what `stats` says of each model, until cancelled. A fault costs one point."""
        while True:
            try:
                self.add(await stats())
            except Exception:
                log.exception("the figures of the last %g s are missing", INTERVAL_SECONDS)
            await sleep(INTERVAL_SECONDS)

    def add(self, stats: Mapping[str, EngineStats]) -> None:
        """Of now, by model; the first time there is nothing yet to compare with."""
        now = self._clock()
        counted = {name: _counted(each.loop) for name, each in stats.items()}
        if self._last is not None and now > self._last_seconds:
            counts = _sum(
                _since(self._last.get(name, _NOTHING), each) for name, each in counted.items()
            )
            loops = [each.loop for each in stats.values()]
            self._points.append(self._point(counts, now - self._last_seconds, loops))
            self._n_points += 1
        self._last, self._last_seconds = counted, now

    def _point(self, counts: _Counted, seconds: float, loops: Sequence[LoopStats]) -> SeriesPoint:
        prompt = counts.computed_tokens + counts.cached_tokens
        first_tokens = counts.first_tokens
        return SeriesPoint(
            time=self._epoch_seconds(),
            generated_tokens_per_second=counts.generated_tokens / seconds,
            prompt_tokens_per_second=prompt / seconds,
            computed_tokens_per_second=counts.computed_tokens / seconds,
            hit_share=counts.cached_tokens / prompt if prompt else None,
            first_token_seconds=counts.first_token_seconds / first_tokens if first_tokens else None,
            evicted_blocks_per_second=counts.evictions / seconds,
            running=sum(loop.running for loop in loops),
            waiting=sum(loop.waiting for loop in loops),
        )


def _since(last: _Counted, now: _Counted) -> _Counted:
    """What has been counted since. Counters that are less than they were are a new process's."""
    if any(count < before for count, before in zip(now, last, strict=True)):
        return now
    return _Counted(*(count - before for count, before in zip(now, last, strict=True)))


def _sum(counts: Iterable[_Counted]) -> _Counted:
    return _Counted(*map(sum, zip(_NOTHING, *counts, strict=True)))


def _counted(loop: LoopStats) -> _Counted:
    return _Counted(
        generated_tokens=loop.generated_tokens,
        computed_tokens=loop.computed_prompt_tokens,
        cached_tokens=loop.cached_prompt_tokens,
        first_tokens=loop.first_tokens,
        first_token_seconds=loop.first_token_seconds,
        evictions=loop.cache.evictions,
    )
