"""`/admin/activity/stream`, for the dashboard. Left out with `--no-dashboard`."""

from contextlib import suppress

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from engine.api import EngineStopped
from server.activity.live import live_requests
from server.dialects.delivery import STREAM_HEADERS
from server.dialects.endpoint import Endpoints, unnamed_events
from server.errors import ClientLeft
from server.http.sse import sse_data
from server.http.waiting import client_waiting
from server.routes.admin_models import pooled_models
from server.routes.cache_tree import EventStream
from server.schemas.admin import Activity
from server.service import Service, ServiceDependency
from server.watch import Poll

router = Endpoints(prefix="/admin/activity")

SHOWN_REQUESTS = 100


@router.endpoint("GET", "/stream", stream=unnamed_events(Activity), response_class=EventStream)
async def activity_stream(service: ServiceDependency) -> Response:
    """Live requests and the models each second, and with them what is new in the log and in the
    series.
    """
    return ActivityStream(service)


class ActivityStream(EventStream):
    """The status line waits for the first event. It ends when the server has been drained."""

    def __init__(self, service: Service) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers(STREAM_HEADERS)
        self._service = service
        self._n_finished = 0  # sent so far
        self._n_points = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with client_waiting(receive), self._service.watch.watching():
                await self._stream(send)
        except ClientLeft:
            pass  # RequestLog has seen it leave

    async def _stream(self, send: Send) -> None:
        watch, closed = self._service.watch, self._service.models.closed
        poll = await watch.fresh()
        event = self._event(poll)
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        with suppress(EngineStopped):  # there is nothing more to see
            while not closed.is_set():
                await send(_part(event))
                poll = await watch.next_after(poll.number)
                event = self._event(poll)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

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


def _part(data: bytes) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": True}
