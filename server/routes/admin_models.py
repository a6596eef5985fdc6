"""`/admin/models`: what is loaded, and what is to be."""

import sys
from collections.abc import Mapping
from typing import Annotated

from anyio import current_time
from fastapi import Query

from engine.values.stats import EngineStats
from server.dialects.endpoint import Endpoints
from server.models import KnownModel, LoadedModel
from server.pool.pooled_model import PooledModel
from server.pool.states import Measuring, State
from server.schemas.pool import PooledModelInfo, PooledModels
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
    return await _told(service, model)


@router.endpoint("POST", "/unload", errors=(400, 404))
async def unload(model: ModelName, service: ServiceDependency) -> PooledModelInfo:
    """Returns when it is gone: what it has accepted ends before. The next request loads it again,
    and one that has failed may be tried again at once.
    """
    await service.models.pool.unload(service.models.find(model))
    return await _told(service, model)


def pooled_models(service: Service, stats: Mapping[str, EngineStats]) -> PooledModels:
    """All models, loaded or not, with the statistics of those that are loaded."""
    budget_bytes = service.models.pool.budget_bytes
    return PooledModels(
        budget_bytes=None if budget_bytes == sys.maxsize else budget_bytes,
        models=[_info(service, known, stats) for known in service.models.known.values()],
    )


async def _told(service: Service, name: str) -> PooledModelInfo:
    known = service.models.known[service.models.find(name)]
    return _info(service, known, await service.models.stats())


def _info(service: Service, known: KnownModel, stats: Mapping[str, EngineStats]) -> PooledModelInfo:
    name, *aliases = (naming.name for naming in known.namings if not naming.adapter)
    model = service.models.pool.models[name]
    state, now = model.state, current_time()
    decode = stats[name].decode if name in stats else None
    is_known = state.measuring is Measuring.DONE and state.need_bytes > 0
    has_failed = state.state is State.FAILED
    return PooledModelInfo(
        id=name,
        aliases=aliases,
        adapters=list(known.settings.adapters),
        source=known.settings.source,
        state=state.state,
        failure=model.failure or None,
        progress=known.progress if model.is_coming else None,
        progress_share=progress_share(known, model, now) if model.is_coming else None,
        requests=state.n_users,
        waiting=len(model.waiters),
        memory_bytes=state.need_bytes if is_known else None,
        resident_bytes=stats[name].memory.resident if name in stats else None,
        decode=decode.why if decode is not None else None,
        idle_seconds=now - state.used_at if state.is_idle else None,
        ttl_seconds=model.ttl_seconds,
        seconds_left=service.models.seconds_left(name) if model.resident else None,
        pinned=state.is_pinned,
        load_seconds=state.load_seconds if known.card is not None else None,
        retry_seconds=max(state.retry_at - now, 0.0) if has_failed else None,
    )


def progress_share(known: KnownModel, model: PooledModel[LoadedModel], now: float) -> float | None:
    """How far one has come that is being fetched or loaded; None where that is not known. Loading
    that takes longer than the last time may take any time.
    """
    state = model.state
    if state.state is not State.LOADING:
        return known.fetched_share
    seconds = now - state.began_at
    is_known = known.card is not None and seconds < state.load_seconds
    return seconds / state.load_seconds if is_known else None
