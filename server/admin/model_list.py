"""`GET /v1/models`, `GET /v1/models/{id}`: OpenAI's keys, and next to them Anthropic's."""

from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import Query
from pydantic import BaseModel

from engine.values.model import SamplingDefaults, Task
from server.dialects.endpoint import MODEL_ERRORS, Endpoints
from server.models.model import Model as RegisteredModel
from server.schemas import State
from server.service import RecordDependency, Service, ServiceDependency

router = Endpoints()


class Model(BaseModel):
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


@router.endpoint("GET", "/v1/models", errors=(400,), response_model_exclude_unset=True)
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
    allowed = record.allowed_models
    listed = [_model(service, name, model) for name, model in service.models.named(allowed)]
    return ModelList(
        object="list",
        data=listed,
        has_more=False,
        first_id=listed[0].id if listed else None,
        last_id=listed[-1].id if listed else None,
        **for_codex,
    )


@router.endpoint("GET", "/v1/models/{id:path}", errors=MODEL_ERRORS)
async def get_model(id: str, service: ServiceDependency, record: RecordDependency) -> Model:
    return _model(service, id, await service.chosen(id, record))


def _model(service: Service, name: str, model: RegisteredModel) -> Model:
    """What only a loaded model knows is null before it has been loaded for the first time."""
    card, alias = model.card, model.aliases[name]
    max_tokens = card.max_sequence_tokens if card else None
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
        type="model",
        display_name=name,
        created_at=datetime.fromtimestamp(service.created, UTC),
        lifecycle="active",
        max_input_tokens=max_tokens,
        max_tokens=max_tokens,
    )
