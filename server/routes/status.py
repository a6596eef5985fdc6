"""`GET /health`, `/load` and `/version`: what watchers and routers ask of a replica."""

from fastapi import APIRouter

from engine.api import EngineStopped
from server import __version__
from server.openapi import errors
from server.schemas.status import Health, Load, Version
from server.service import ServiceDependency

router = APIRouter()


@router.head("/health", include_in_schema=False)
@router.get("/health", responses=errors(503), response_model_exclude_none=True)
async def health(service: ServiceDependency) -> Health:
    """Red as soon as the engine's loop no longer turns. Degraded, and still 200, where all is
    answered but something has been lost that only another start brings back.
    """
    if not service.engine.is_alive():
        raise EngineStopped("The engine has stopped.")
    loop = (await service.engine.stats()).loop
    if loop.n_contradictions:
        reason = "the KV store contradicts itself: the log says how; another start empties it"
        return Health(status="degraded", reason=reason)
    disk = loop.cache.disk
    if disk is not None and disk.ended_threads:
        lost = ", ".join(disk.ended_threads)
        return Health(status="degraded", reason=f"threads of the disk cache have ended: {lost}")
    return Health(status="ok")


@router.head("/load", include_in_schema=False)
@router.get("/load", responses=errors(503))
async def load(service: ServiceDependency) -> Load:
    """At once, whatever step is running."""
    stats = await service.engine.stats()
    return Load(
        server_load=stats.sequences.live, running=stats.loop.running, waiting=stats.loop.waiting
    )


@router.head("/version", include_in_schema=False)
@router.get("/version", responses=errors(503))
async def version() -> Version:
    return Version(version=__version__)
