"""`/admin/activity/stream`, for the dashboard. Left out with `--no-dashboard`."""

from contextlib import suppress

from starlette.responses import Response

from engine.api import EngineStopped
from server.activity.live import live_requests
from server.dialects.endpoint import Endpoints, unnamed_events
from server.http.stream import EVENT_STREAM, DeferredStream, sse_data
from server.routes.admin_models import pooled_models
from server.routes.cache_tree import EventStream
from server.schemas.admin import Activity
from server.service import RecordDependency, Service, ServiceDependency
from server.watch import Poll

router = Endpoints(prefix="/admin/activity")

SHOWN_REQUESTS = 100


@router.endpoint("GET", "/stream", stream=unnamed_events(Activity), response_class=EventStream)
async def activity_stream(service: ServiceDependency, record: RecordDependency) -> Response:
    """Live requests and the models each second, and with them what is new in the log and in the
    series.
    """
    record.never_ends()
    return DeferredStream(
        EVENT_STREAM, ActivityFeed(service).fill, service.settings.keepalive_seconds
    )


class ActivityFeed:
    """The events of one client. It ends when the server has been drained."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._n_finished = 0  # sent so far
        self._n_points = 0

    async def fill(self, stream: DeferredStream) -> None:
        watch, closed = self._service.watch, self._service.models.closed
        async with watch.watching():
            poll = await watch.fresh()
            event = self._event(poll)
            with suppress(EngineStopped):  # there is nothing more to see
                while not closed.is_set():
                    await stream.write(event)
                    poll = await watch.next_after(poll.number)
                    event = self._event(poll)

    def _event(self, poll: Poll) -> bytes:
        """Raises EngineStopped if all engines have."""
        if isinstance(poll.requests, EngineStopped):
            raise EngineStopped(str(poll.requests))
        tracker, series = self._service.tracker, self._service.series
        live = tracker.live
        finished = tracker.finished(self._n_finished)[::-1]
        points = series.points(self._n_points)
        activity = Activity(
            requests=live_requests(live[:SHOWN_REQUESTS], poll.requests, tracker.now()),
            hidden_requests=max(len(live) - SHOWN_REQUESTS, 0),
            finished=finished,
            points=points,
            models=pooled_models(self._service, poll.stats),
        )
        self._n_finished = finished[-1].number if finished else self._n_finished
        self._n_points = series.n_points
        return sse_data(activity.model_dump_json().encode())
