"""`GET /v1/models`, `GET /v1/models/{id}`."""

from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query

from server.generation.models import ServedModel
from server.openapi import errors
from server.schemas.models import Model, ModelList
from server.service import Service, ServiceDependency

router = APIRouter()


@router.head("/v1/models", include_in_schema=False)
@router.get("/v1/models", response_model_exclude_unset=True, responses=errors(400, 503))
async def list_models(
    service: ServiceDependency,
    client_version: Annotated[str | None, Query(max_length=256)] = None,
) -> ModelList:
    """Codex sends `client_version`, and expects a list `models` of its own form beside `data`. It
    is empty: its entries would have to contain Codex's own instructions.
    """
    for_codex: dict[str, Any] = {} if client_version is None else {"models": []}
    names = list(service.models)
    return ModelList(
        object="list",
        data=[_model(service, model) for model in service.models.values()],
        has_more=False,
        first_id=names[0],
        last_id=names[-1],
        **for_codex,
    )


@router.head("/v1/models/{id:path}", include_in_schema=False)
@router.get("/v1/models/{id:path}", responses=errors(404, 503))
async def get_model(id: str, service: ServiceDependency) -> Model:
    return _model(service, service.resolve(id))


def _model(service: Service, model: ServedModel) -> Model:
    max_tokens = model.engine.card.max_sequence_tokens
    return Model(
        id=model.name,
        object="model",
        created=service.created,
        owned_by="rootstock",
        max_model_len=max_tokens,
        sampling_defaults=model.engine.card.sampling,
        type="model",
        display_name=model.name,
        created_at=datetime.fromtimestamp(service.created, UTC),
        lifecycle="active",
        max_input_tokens=max_tokens,
        max_tokens=max_tokens,
    )
