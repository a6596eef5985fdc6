"""`GET /health`: red as soon as the engine's loop no longer turns."""

from fastapi import APIRouter

from engine.api import EngineStopped
from server.openapi import errors
from server.service import ServiceDependency

router = APIRouter()


@router.head("/health", include_in_schema=False)
@router.get("/health", responses=errors(503))
async def health(service: ServiceDependency) -> dict[str, str]:
    if not service.engine.is_alive():
        raise EngineStopped("The engine has stopped.")
    return {"status": "ok"}
