"""The figures of the last 15 minutes, as the dashboard draws them."""

import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from itertools import islice
from typing import Annotated, NamedTuple, cast

from anyio import current_time, sleep
from fastapi import Depends, Request
from pydantic import BaseModel, ConfigDict, Field

from engine.values.stats import EngineStats, Latency

KEPT_SECONDS = 900.0
N_POINTS = 300
"""A chart is some 200 to 400 pixels wide: more points would share pixels."""

INTERVAL_SECONDS = KEPT_SECONDS / N_POINTS


log = logging.getLogger("rootstock.activity")


class SeriesPoint(BaseModel):
    """What happened in an interval, and how things stand at its end."""

    model_config = ConfigDict(frozen=True)

    time: float = Field(description="The end of the interval, in seconds since the epoch.")
    generated_tokens_per_second: float
    prompt_tokens_per_second: float = Field(description="Tokens of admitted prompts.")
    computed_tokens_per_second: float = Field(
        description="Prompt tokens that were not found in the cache."
    )
    hit_share: float | None = Field(
        description="Share of the prompt tokens that was found in the cache. Null without prompts."
    )
    first_token_seconds: float | None = Field(
        description="The mean from arrival to first token. Null without a first token."
    )
    evicted_blocks_per_second: float
    running: int
    waiting: int


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
    """The last N_POINTS points, one each INTERVAL_SECONDS."""

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
        """The number of points so far, including those that are no longer kept."""
        return self._n_points

    def points(self, after: int = 0) -> list[SeriesPoint]:
        """The points after the first `after` so far, the oldest first."""
        n_old = max(after - (self._n_points - len(self._points)), 0)
        return list(islice(self._points, n_old, None))

    async def run(self, stats: Callable[[], Awaitable[Mapping[str, EngineStats]]]) -> None:
        """Add a point of each model's `stats` until cancelled. An error costs one point."""
        while True:
            try:
                self.add(await stats())
            except Exception:
                log.exception("the figures of the last %g s are missing", INTERVAL_SECONDS)
            await sleep(INTERVAL_SECONDS)

    def add(self, stats: Mapping[str, EngineStats]) -> None:
        """Add a point of statistics by model. The first call adds none: a point is what has changed
        since the call before.
        """
        now = self._clock()
        counted = {name: _counted(each) for name, each in stats.items()}
        if self._last is not None and now > self._last_seconds:
            counts = _sum(
                _since(self._last.get(name, _NOTHING), each) for name, each in counted.items()
            )
            self._points.append(self._point(counts, now - self._last_seconds, stats.values()))
            self._n_points += 1
        self._last, self._last_seconds = counted, now

    def _point(
        self, counts: _Counted, seconds: float, stats: Collection[EngineStats]
    ) -> SeriesPoint:
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
            running=sum(each.running for each in stats),
            waiting=sum(each.waiting for each in stats),
        )


def _since(last: _Counted, now: _Counted) -> _Counted:
    """What has been counted since. Counters that are less than they were are a new process's."""
    if any(count < before for count, before in zip(now, last, strict=True)):
        return now
    return _Counted(*(count - before for count, before in zip(now, last, strict=True)))


def _sum(counts: Iterable[_Counted]) -> _Counted:
    return _Counted(*map(sum, zip(_NOTHING, *counts, strict=True)))


def _counted(stats: EngineStats) -> _Counted:
    first_tokens = stats.latencies[Latency.FIRST_TOKEN]
    return _Counted(
        generated_tokens=stats.generated_tokens,
        computed_tokens=stats.computed_prompt_tokens,
        cached_tokens=stats.cache.hit_tokens,
        first_tokens=first_tokens.count,
        first_token_seconds=first_tokens.total,
        evictions=stats.cache.evictions,
    )


async def _series(request: Request) -> SeriesRecord:
    return cast(SeriesRecord, request.app.state.series)


SeriesDependency = Annotated[SeriesRecord, Depends(_series)]
