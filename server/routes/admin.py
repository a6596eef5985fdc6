"""`/admin/requests` and `/admin/series`: who is being served and who was, and how it went."""

from typing import Annotated

from fastapi import Path
from starlette.status import HTTP_204_NO_CONTENT

from server.activity.live import live_requests
from server.activity.series import INTERVAL_SECONDS
from server.dialects.endpoint import Endpoints
from server.errors import ApiError
from server.schemas.admin import FinishedRequests, LiveRequests, Series
from server.service import ServiceDependency

router = Endpoints(prefix="/admin")

RequestId = Annotated[
    str, Path(pattern="^[0-9a-f]{32}$", description="The `id` of a live request.")
]


@router.endpoint("GET", "/requests")
async def requests(service: ServiceDependency) -> LiveRequests:
    """Those that the engine is asked to answer. Waits for the end of the running step."""
    tracker = service.tracker
    live = tracker.live
    infos = await service.models.requests()
    return LiveRequests(requests=live_requests(live, infos, tracker.now()))


@router.endpoint("GET", "/requests/log")
async def finished_requests(service: ServiceDependency) -> FinishedRequests:
    """The last 300 that are over, without those refused before the engine was asked."""
    return FinishedRequests(requests=service.tracker.finished())


@router.endpoint(
    "POST", "/requests/{id}/cancel", errors=(400, 404), status_code=HTTP_204_NO_CONTENT
)
async def cancel_request(id: RequestId, service: ServiceDependency) -> None:
    """Its client gets the error `ended_by_admin`, with status 410 or in its stream. What was
    computed stays in the cache.
    """
    if not service.tracker.end(id):
        message = f"There is no request {id} being answered (any more)."
        raise ApiError(404, message, param="id", code="no_such_request")


@router.endpoint("GET", "/series")
async def series(service: ServiceDependency) -> Series:
    """At once, whatever step is running."""
    return Series(interval_seconds=INTERVAL_SECONDS, points=service.series.points())
