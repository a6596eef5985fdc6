"""`/admin/requests` and `/admin/series`: who is being served and who was, and how it went."""

from typing import Annotated

from fastapi import APIRouter, Path
from starlette.status import HTTP_204_NO_CONTENT

from server.activity.live import live_requests
from server.activity.series import INTERVAL_SECONDS
from server.dialects.endpoint import errors
from server.errors import ApiError
from server.schemas.admin import FinishedRequests, LiveRequests, Series
from server.service import ServiceDependency

router = APIRouter(prefix="/admin")

RequestId = Annotated[
    str, Path(pattern="^[0-9a-f]{32}$", description="The `id` of a live request.")
]


@router.head("/requests", include_in_schema=False)
@router.get("/requests", responses=errors(503))
async def requests(service: ServiceDependency) -> LiveRequests:
    """Those that the engine is asked to answer. Waits for the end of the running step."""
    tracker = service.tracker
    live = tracker.live
    infos = await service.models.requests()
    return LiveRequests(requests=live_requests(live, infos, tracker.now()))


@router.head("/requests/log", include_in_schema=False)
@router.get("/requests/log", responses=errors(503))
async def finished_requests(service: ServiceDependency) -> FinishedRequests:
    """The last 300 that are over, without those refused before the engine was asked."""
    return FinishedRequests(requests=service.tracker.finished())


@router.post(
    "/requests/{id}/cancel", status_code=HTTP_204_NO_CONTENT, responses=errors(400, 404, 503)
)
async def cancel_request(id: RequestId, service: ServiceDependency) -> None:
    """Its client gets the error `ended_by_admin`, with status 410 or in its stream. What was
    computed stays in the cache.
    """
    if not service.tracker.end(id):
        message = f"There is no request {id} being answered (any more)."
        raise ApiError(404, message, param="id", code="no_such_request")


@router.head("/series", include_in_schema=False)
@router.get("/series", responses=errors(503))
async def series(service: ServiceDependency) -> Series:
    """At once, whatever step is running."""
    return Series(interval_seconds=INTERVAL_SECONDS, points=service.series.points())
