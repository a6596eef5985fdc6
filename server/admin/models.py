"""`/admin/models`: which models are in memory, and ways to load and unload them."""

import sys
from collections.abc import Mapping
from typing import Annotated

from anyio import current_time
from fastapi import Query

from engine.values.stats import EngineStats
from server.dialects.endpoint import Endpoints
from server.models.model import Model
from server.models.policy import Loading, Ready, need_of
from server.schemas import PooledModelInfo, PooledModels
from server.service import RecordDependency, Service, ServiceDependency

router = Endpoints(prefix="/admin/models")

ModelName = Annotated[str, Query(min_length=1, max_length=256, description="One of its names.")]


@router.endpoint("GET", "")
async def models(service: ServiceDependency) -> PooledModels:
    """At once, whatever is being loaded."""
    return pooled_models(service, await service.models.stats())


@router.endpoint("POST", "/load", errors=(400, 404))
async def load(
    model: ModelName, service: ServiceDependency, record: RecordDependency
) -> PooledModelInfo:
    """Returns when it is loaded. Others make room as they would for a request."""
    await service.model(model, record)
    return await _after(service, model)


@router.endpoint("POST", "/unload", errors=(400, 404))
async def unload(model: ModelName, service: ServiceDependency) -> PooledModelInfo:
    """Returns when it is gone: what it has accepted ends before. The next request loads it again,
    and one that has failed may be tried again at once.
    """
    await service.models.pool.unload(service.models.find(model))
    return await _after(service, model)


def pooled_models(service: Service, stats: Mapping[str, EngineStats]) -> PooledModels:
    """All models, loaded or not, with the statistics of those that are loaded."""
    budget_bytes = service.models.pool.budget_bytes
    return PooledModels(
        budget_bytes=None if budget_bytes == sys.maxsize else budget_bytes,
        models=[_info(model, stats.get(name)) for name, model in service.models.known.items()],
    )


async def _after(service: Service, name: str) -> PooledModelInfo:
    """The model after a change."""
    model = service.models.find(name)
    return _info(model, (await service.models.stats()).get(model.name))


def _info(model: Model, stats: EngineStats | None) -> PooledModelInfo:
    name, *aliases = (alias.name for alias in model.aliases.values() if not alias.adapter)
    state, need, now = model.state, need_of(model.state), current_time()
    leases = model.loaded.leases if model.loaded is not None else ()
    return PooledModelInfo(
        id=name,
        aliases=aliases,
        adapters=list(model.settings.adapters),
        source=model.settings.source,
        state=model.public_state,
        failure=model.failure.reason or None if model.failure is not None else None,
        progress=model.progress if model.is_coming else None,
        progress_share=model.progress_share(now) if model.is_coming else None,
        requests=len(leases),
        waiting=len(model.waiting),
        memory_bytes=need.bytes or None if need is not None else None,
        resident_bytes=stats.memory.resident if stats is not None else None,
        decode=stats.decode.why if stats is not None and stats.decode is not None else None,
        idle_seconds=now - state.used_at
        if isinstance(state, Ready) and not state.n_leases
        else None,
        ttl_seconds=model.settings.ttl_seconds,
        seconds_left=model.seconds_left(now),
        pinned=model.is_pinned,
        load_seconds=need.load_seconds if need is not None and model.card is not None else None,
        retry_seconds=_retry_seconds(model, now),
    )


def _retry_seconds(model: Model, now: float) -> float | None:
    if model.failure is None or isinstance(model.state, Loading):
        return None
    return max(model.failure.retry_at - now, 0.0)
