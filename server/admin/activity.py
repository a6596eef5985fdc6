"""`/admin/requests`, `/admin/series` and `/admin/activity/stream`: requests that are answered now,
requests that were, and the figures of the last minutes.
"""

from collections import defaultdict
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Annotated

from fastapi import Path
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response
from starlette.status import HTTP_204_NO_CONTENT

from engine.api import EngineStopped
from engine.values.stats import RequestInfo
from server.activity.tracker import TrackedRequest
from server.admin.models import pooled_models
from server.admin.series import INTERVAL_SECONDS, SeriesDependency, SeriesPoint, SeriesRecord
from server.admin.watch import EventStream, Watch, WatchDependency, event_stream
from server.dialects.endpoint import Endpoints, unnamed_events
from server.errors import ApiError
from server.http.stream import sse_data
from server.schemas import FinishedRequest, LiveRequest, LiveRequests, LiveStatus, PooledModels
from server.service import RecordDependency, Service, ServiceDependency

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
    """The live requests, and what is new since the event before. The first event has all."""

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
    """The last 300 finished requests, without those refused before they reached the engine."""
    return FinishedRequests(requests=service.tracker.finished())


@router.endpoint(
    "POST", "/requests/{id}/cancel", errors=(400, 404), status_code=HTTP_204_NO_CONTENT
)
async def cancel_request(id: RequestId, service: ServiceDependency) -> None:
    """End a request: its client gets the error `ended_by_admin`, with status 410 or in its stream.
    What was computed stays in the cache.
    """
    if not service.tracker.end(id):
        message = f"There is no request {id} being answered (any more)."
        raise ApiError(404, message, param="id", code="no_such_request")


@router.endpoint("GET", "/series")
async def series(record: SeriesDependency) -> Series:
    """At once, whatever step is running."""
    return Series(interval_seconds=INTERVAL_SECONDS, points=record.points())


@stream_router.endpoint(
    "GET", "/stream", stream=unnamed_events(Activity), response_class=EventStream
)
async def activity_stream(
    service: ServiceDependency,
    record: RecordDependency,
    watch: WatchDependency,
    series: SeriesDependency,
) -> Response:
    """Live requests and the models each second, and with them what is new in the log and in the
    series.
    """
    return event_stream(_activity(service, watch, series), service, record)


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
    """Of the prompt that sequences of one request have in common."""
    return max((min(info.computed_tokens, info.prompt_tokens) for info in sequences), default=0)
