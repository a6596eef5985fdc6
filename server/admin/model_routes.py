"""`/v1/models`: the models that requests can name. `/admin/models`: which of them are in memory."""

import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from anyio import current_time
from fastapi import Query
from pydantic import BaseModel

from engine.values.model import ModelCard, Place, SamplingDefaults, Task, facts_of
from engine.values.stats import EngineStats
from server.admin.alarms import alarms
from server.admin_schema import PooledModelInfo, PooledModels, State, with_facts
from server.dialects.endpoint import MODEL_ERRORS, Endpoints
from server.generation.template import TemplateTraits
from server.http.stream import client_waiting
from server.models.model import Model as RegisteredModel
from server.models.policy import Loading, Ready, need_of
from server.service import Context, RecordDependency, Service, ServiceDependency

router = Endpoints(prefix="/admin/models")
list_router = Endpoints()

ModelName = Annotated[str, Query(min_length=1, max_length=256, description="One of its names.")]


@router.endpoint("GET", "")
async def models(service: ServiceDependency) -> PooledModels:
    """Answers at once: it does not wait for loads."""
    return pooled_models(service, await service.models.stats())


@router.endpoint("POST", "/load", errors=(400, 404))
async def load(model: ModelName, context: Context) -> PooledModelInfo:
    """Returns when the model is loaded. Other models are unloaded to make room, as for a
    request.
    """
    async with client_waiting(context.http.receive):
        await context.service.model(model, context.record)
    return await _after(context.service, model)


@router.endpoint("POST", "/unload", errors=(400, 404))
async def unload(model: ModelName, service: ServiceDependency) -> PooledModelInfo:
    """Returns when the model is unloaded, after its accepted requests. The next request loads it
    again; a failed model may be retried at once.
    """
    await service.models.pool.unload(service.models.find(model))
    return await _after(service, model)


def pooled_models(service: Service, stats: Mapping[str, EngineStats]) -> PooledModels:
    """All models, loaded or not, with the statistics of loaded ones."""
    budget_bytes = service.models.pool.budget_bytes
    return PooledModels(
        budget_bytes=None if budget_bytes == sys.maxsize else budget_bytes,
        memory_guard=None if service.guard is None else service.guard.info(),
        models=[_info(model, stats.get(name)) for name, model in service.models.known.items()],
    )


async def _after(service: Service, name: str) -> PooledModelInfo:
    """The model after a change."""
    model = service.models.find(name)
    return _info(model, (await service.models.stats()).get(model.name))


def _info(model: RegisteredModel, stats: EngineStats | None) -> PooledModelInfo:
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
        needed_bytes=need.bytes or None if need is not None else None,
        memory=stats.memory.model if stats is not None else None,
        decode=stats.decode.why if stats is not None and stats.decode is not None else None,
        idle_seconds=now - state.used_at
        if isinstance(state, Ready) and not state.n_leases
        else None,
        ttl_seconds=model.settings.ttl_seconds,
        seconds_left=model.seconds_left(now),
        pinned=model.settings.pinned,
        alarms=alarms(stats, model.card) if stats is not None else [],
        load_seconds=need.load_seconds if need is not None and model.card is not None else None,
        retry_seconds=_retry_seconds(model, now),
    )


def _retry_seconds(model: RegisteredModel, now: float) -> float | None:
    if model.failure is None or isinstance(model.state, Loading):
        return None
    return max(model.failure.retry_at - now, 0.0)


@with_facts(Place.MODELS)
class Model(BaseModel):
    """A model under one of its names. What only a loaded model knows is null before its first
    load.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str  # the first of its names; this and the next are vLLM's
    parent: str | None  # of an adapter the model that it changes
    state: State  # whether it is in memory
    # Tokens of prompt and answer that context and KV cache hold, by vLLM's name
    max_model_len: int | None
    sampling_defaults: SamplingDefaults | None
    tasks: list[Task] | None
    tools: bool | None  # whether it writes tool calls; null while it is not loaded
    tool_format: str | None  # the format of its calls; null without, or while it is not loaded
    images: bool | None  # whether it takes images in prompts; null before its first load
    template_traits: TemplateTraits | None  # null without one, or while it is not loaded

    type: Literal["model"]
    display_name: str
    created_at: datetime
    lifecycle: Literal["active"]
    max_input_tokens: int | None
    max_tokens: int | None


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[Model]
    has_more: Literal[False]
    first_id: str | None
    last_id: str | None
    models: list[Any] | None = None  # set for Codex alone, which reads no list without it


@list_router.endpoint("GET", "/v1/models", errors=(400,), response_model_exclude_unset=True)
async def list_models(
    service: ServiceDependency,
    record: RecordDependency,
    client_version: Annotated[str | None, Query(max_length=256)] = None,
) -> ModelList:
    """Codex sends `client_version`, and expects a list `models` of its own form next to `data`. It
    is empty: its entries would have to contain Codex's own instructions.
    """
    for_codex: dict[str, Any] = {} if client_version is None else {"models": []}
    await service.models.discover_all()
    allowed = record.principal.allowed_models
    listed = [_model(service, name, model) for name, model in service.models.named(allowed)]
    return ModelList(
        object="list",
        data=listed,
        has_more=False,
        first_id=listed[0].id if listed else None,
        last_id=listed[-1].id if listed else None,
        **for_codex,
    )


# An empty id, which elsewhere means the first model, is none here.
list_router.endpoint(
    "GET", "/v1/models/", errors=None, response_model_exclude_unset=True, include_in_schema=False
)(list_models)


@list_router.endpoint("GET", "/v1/models/{id:path}", errors=MODEL_ERRORS)
async def get_model(id: str, service: ServiceDependency, record: RecordDependency) -> Model:
    return _model(service, id, await service.chosen(id, record))


def _model(service: Service, name: str, model: RegisteredModel) -> Model:
    card, alias = model.card, model.aliases[name]
    max_tokens = card.max_sequence_tokens if card else None
    served = model.loaded.served[name] if model.loaded else None
    planner = served.planner if served else None
    tools = planner.tools if planner else None
    has_template = card is not None and Task.GENERATE in card.tasks
    return Model(
        id=name,
        object="model",
        created=service.created,
        owned_by="rootstock",
        state=model.public_state,
        root=alias.root,
        parent=alias.parent or None,
        max_model_len=max_tokens,
        sampling_defaults=card.sampling if card else None,
        tasks=list(card.tasks) if card else None,
        tools=tools is not None if planner else None,
        tool_format=tools.name if tools else None,
        images=card.images is not None if card else None,
        template_traits=served.prompts.traits if served and has_template else None,
        type="model",
        display_name=name,
        created_at=datetime.fromtimestamp(service.created, UTC),
        lifecycle="active",
        max_input_tokens=max_tokens,
        max_tokens=max_tokens,
        **{name: getattr(card, name, None) for name in facts_of(ModelCard, Place.MODELS)},
    )
