"""`GET /health`, `/load` and `/version`: what watchers and routers ask of a replica."""

from fastapi import APIRouter

from engine.api import EngineStopped
from server import __version__
from server.openapi import errors
from server.schemas.status import Load, Version
from server.service import ServiceDependency

router = APIRouter()


@router.head("/health", include_in_schema=False)
@router.get("/health", responses=errors(503))
async def health(service: ServiceDependency) -> dict[str, str]:
    """Red as soon as the engine's loop no longer turns."""
    if not service.engine.is_alive():
        raise EngineStopped("The engine has stopped.")
    return {"status": "ok"}


@router.head("/load", include_in_schema=False)
@router.get("/load", responses=errors(503))
async def load(service: ServiceDependency) -> Load:
    """At once, whatever step is running."""
    stats = service.engine.stats()
    return Load(
        server_load=stats.sequences.live, running=stats.loop.running, waiting=stats.loop.waiting
    )


@router.head("/version", include_in_schema=False)
@router.get("/version", responses=errors(503))
async def version() -> Version:
    return Version(version=__version__)
