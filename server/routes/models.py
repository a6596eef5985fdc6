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
    """Codex says its version, and wants a list of its own kind beside this one: an empty one, as
    its entries would have to bring Codex's own instructions.
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
    room_tokens = model.engine.card.max_sequence_tokens
    return Model(
        id=model.name,
        object="model",
        created=service.created,
        owned_by="rootstock",
        max_model_len=model.engine.card.max_sequence_tokens,
        sampling_defaults=model.engine.card.sampling,
        type="model",
        display_name=model.name,
        created_at=datetime.fromtimestamp(service.created, UTC),
        lifecycle="active",
        max_input_tokens=room_tokens,
        max_tokens=room_tokens,
    )
