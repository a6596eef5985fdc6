"""`GET /health`, `/load` and `/version`: what watchers and routers ask of a replica."""

from collections.abc import Iterator

from engine.api import EngineStopped
from engine.values.stats import EngineStats
from server import __version__
from server.dialects.endpoint import Endpoints
from server.models.model import Model
from server.models.policy import Loading
from server.schemas.status import Health, Load, Version
from server.service import ServiceDependency

router = Endpoints()


@router.endpoint("GET", "/health", response_model_exclude_none=True)
async def health(service: ServiceDependency) -> Health:
    """Red as soon as no model can be served. Degraded, and still 200, where one of several has
    failed, where one is being loaded again, where something has been lost that only another start
    brings back, or where the disk cache cannot be written.
    """
    known = service.models.known.values()
    failed = [model for model in known if not model.is_healthy]
    if len(failed) == len(known):
        raise EngineStopped("The engine has stopped.")
    reasons = [f"{model.name} has failed: {_failure(model)}" for model in failed]
    reasons += [
        f"{model.name} has failed and is being loaded again: {_failure(model)}"
        for model in known
        if isinstance(model.state, Loading) and model.failure is not None
    ]
    for stats in (await service.models.stats()).values():
        reasons += _losses(stats)
    if reasons:
        return Health(status="degraded", reason="; ".join(reasons))
    return Health(status="ok")


def _failure(model: Model) -> str:
    return "its engine loop has stopped" if model.failure is None else model.failure.reason


def _losses(stats: EngineStats) -> Iterator[str]:
    if stats.contradictions:
        yield "the KV store contradicts itself: the log says how; another start empties it"
    disk = stats.cache.disk
    if disk is not None and disk.ended_threads:
        yield f"threads of the disk cache have ended: {', '.join(disk.ended_threads)}"
    if disk is not None and disk.write_fault is not None:
        yield f"the disk cache cannot be written: {disk.write_fault}"


@router.endpoint("GET", "/load")
async def load(service: ServiceDependency) -> Load:
    """At once, whatever step is running."""
    stats = (await service.models.stats()).values()
    return Load(
        server_load=sum(each.sequences.live for each in stats),
        running=sum(each.running for each in stats),
        waiting=sum(each.waiting for each in stats),
    )


@router.endpoint("GET", "/version")
async def version() -> Version:
    return Version(version=__version__)
