"""`GET /admin/requests`: who is being served."""

from fastapi import APIRouter

from server.openapi import errors
from server.schemas.admin import LiveRequest, LiveRequests
from server.service import ServiceDependency

router = APIRouter(prefix="/admin")


@router.head("/requests", include_in_schema=False)
@router.get("/requests", responses=errors(503))
async def live_requests(service: ServiceDependency) -> LiveRequests:
    """Waits for the end of the running step."""
    live = await service.engine.requests()
    return LiveRequests(requests=[LiveRequest.model_validate(info) for info in live])
