"""`/admin/requests`, `/admin/series` and `/admin/activity/stream`: requests that are answered now,
requests that were, and the figures of the last 15 minutes.
"""

import logging
import time
from collections import defaultdict, deque
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from itertools import islice
from typing import Annotated, NamedTuple, cast

from anyio import current_time, sleep
from fastapi import Depends, Path, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response
from starlette.status import HTTP_204_NO_CONTENT

from engine.api import EngineStopped
from engine.values.stats import EngineStats, Latency, RequestInfo
from server.activity import TrackedRequest
from server.admin.model_routes import pooled_models
from server.admin.watch import EventStream, Watch, WatchDependency, event_stream
from server.admin_schema import FinishedRequest, LiveRequest, LiveRequests, LiveStatus, PooledModels
from server.dialects.endpoint import Endpoints, unnamed_events
from server.errors import ApiError, ended_by_admin
from server.http.stream import sse_data
from server.service import Context, Service, ServiceDependency

KEPT_SECONDS = 900.0
N_POINTS = 300
"""A chart is some 200 to 400 pixels wide: more points would share pixels."""

INTERVAL_SECONDS = KEPT_SECONDS / N_POINTS


log = logging.getLogger("rootstock.activity")


class SeriesPoint(BaseModel):
    """The counts of an interval, and the state at its end."""

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
        """The number of points so far, including dropped ones."""
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
    """The increase of the counters. A counter that is smaller than before belongs to a new
    process.
    """
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


router = Endpoints(prefix="/admin")
stream_router = Endpoints(prefix="/admin/activity")
"""Left out with `--no-dashboard`."""

SHOWN_REQUESTS = 100

RequestId = Annotated[
    str, Path(pattern="^[0-9a-f]{32}$", description="The `id` of a live request.")
]


class FinishedRequests(BaseModel):
    requests: list[FinishedRequest] = Field(description="The latest first.")


class Series(BaseModel):
    interval_seconds: float
    points: list[SeriesPoint] = Field(
        description="Points of the last 15 minutes, the oldest first."
    )


class Activity(BaseModel):
    """The live requests, and the changes since the previous event. The first event has
    everything.
    """

    model_config = ConfigDict(frozen=True)

    requests: list[LiveRequest] = Field(description="The oldest 100.")
    hidden_requests: int = Field(description="Live requests beyond those.")
    finished: list[FinishedRequest] = Field(description="The oldest first.")
    points: list[SeriesPoint] = Field(description="Points of the series, the oldest first.")
    models: PooledModels = Field(description="As `/admin/models` has them.")


@router.endpoint("GET", "/requests")
async def requests(service: ServiceDependency) -> LiveRequests:
    """The requests that the engine is answering. Waits for the end of the running step."""
    tracker = service.tracker
    live = tracker.live
    infos = await service.models.requests()
    return LiveRequests(requests=live_requests(live, infos, tracker.now()))


@router.endpoint("GET", "/requests/log")
async def finished_requests(service: ServiceDependency) -> FinishedRequests:
    """The last 300 requests that an engine answered, and the last 50 that were refused before."""
    return FinishedRequests(requests=service.tracker.finished())


@router.endpoint(
    "POST", "/requests/{id}/cancel", errors=(400, 404), status_code=HTTP_204_NO_CONTENT
)
async def cancel_request(id: RequestId, service: ServiceDependency) -> None:
    """End a request: its client gets the error `ended_by_admin`, with status 410 or in its stream.
    What was computed stays in the cache.
    """
    if not service.tracker.end(id, ended_by_admin()):
        message = f"There is no request {id} being answered (any more)."
        raise ApiError(404, message, param="id", code="no_such_request")


@router.endpoint("GET", "/series")
async def series(record: SeriesDependency) -> Series:
    """Answers at once: it does not wait for a step."""
    return Series(interval_seconds=INTERVAL_SECONDS, points=record.points())


@stream_router.endpoint(
    "GET", "/stream", stream=unnamed_events(Activity), response_class=EventStream
)
async def activity_stream(
    context: Context, watch: WatchDependency, series: SeriesDependency
) -> Response:
    """Live requests and models each second, with the new entries of the log and the series."""
    return await event_stream(_activity(context.service, watch, series), context)


async def _activity(
    service: Service, watch: Watch, series: SeriesRecord
) -> AsyncGenerator[bytes, None]:
    """Events until all engines have stopped, or the server has been drained. Raises EngineStopped
    in place of the first one.
    """
    tracker = service.tracker
    n_finished = n_points = 0  # sent so far
    async with watch.watching():
        poll = await watch.fresh()
        if isinstance(poll.requests, EngineStopped):
            raise EngineStopped(str(poll.requests))
        while not isinstance(poll.requests, EngineStopped):
            live = tracker.live
            finished = tracker.finished(n_finished)[::-1]
            points = series.points(n_points)
            n_finished = finished[-1].number if finished else n_finished
            n_points = series.n_points
            activity = Activity(
                requests=live_requests(live[:SHOWN_REQUESTS], poll.requests, tracker.now()),
                hidden_requests=max(len(live) - SHOWN_REQUESTS, 0),
                finished=finished,
                points=points,
                models=pooled_models(service, poll.stats),
            )
            yield sse_data(activity.model_dump_json().encode())
            if service.models.closed.is_set():
                return
            poll = await watch.next_after(poll.number)


def live_requests(
    tracked: Iterable[TrackedRequest], infos: Iterable[RequestInfo], now: float
) -> list[LiveRequest]:
    """A row for each request; `now` is of the tracker's clock."""
    by_request = defaultdict[str, list[RequestInfo]](list)
    for info in infos:
        by_request[info.request_id].append(info)
    return [_row(one, [by_request[r.id] for r in one.requests], now) for one in tracked]


def _row(
    tracked: TrackedRequest, known: Sequence[Sequence[RequestInfo]], now: float
) -> LiveRequest:
    infos = [info for sequences in known for info in sequences]
    status = _status(tracked, infos)
    waiting = min((i for i in infos if i.waits_for), key=lambda info: info.index, default=None)
    summary = tracked.summary(sum(info.accepted_draft_tokens for info in infos))
    return LiveRequest(
        **vars(summary),
        status=status,
        waits_for=waiting.waits_for if waiting and status == "waiting" else None,
        age_seconds=now - tracked.began_seconds,
        computed_tokens=sum(map(_computed_tokens, known)),
        blocks=sum(info.blocks for info in infos),
    )


def _status(tracked: TrackedRequest, infos: Sequence[RequestInfo]) -> LiveStatus:
    if not tracked.unfinished:
        return "sending"
    if not infos:
        return "preparing"
    return "waiting" if all(info.waits_for for info in infos) else "running"


def _computed_tokens(sequences: Sequence[RequestInfo]) -> int:
    """The computed tokens of the common prompt of a request's sequences."""
    return max((min(info.computed_tokens, info.prompt_tokens) for info in sequences), default=0)
