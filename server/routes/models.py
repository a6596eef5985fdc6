"""`GET /v1/models`, `GET /v1/models/{id}`."""

from fastapi import APIRouter

from server.models import ServedModel
from server.openapi import errors
from server.schemas.models import Model, ModelList
from server.service import Service, ServiceDependency

router = APIRouter()


@router.head("/v1/models", include_in_schema=False)
@router.get("/v1/models", responses=errors(503))
async def list_models(service: ServiceDependency) -> ModelList:
    return ModelList(
        object="list", data=[_model(service, model) for model in service.models.values()]
    )


@router.head("/v1/models/{id:path}", include_in_schema=False)
@router.get("/v1/models/{id:path}", responses=errors(404, 503))
async def get_model(id: str, service: ServiceDependency) -> Model:
    return _model(service, service.resolve(id))


def _model(service: Service, model: ServedModel) -> Model:
    return Model(
        id=model.name,
        object="model",
        created=service.created,
        owned_by="rootstock",
        max_model_len=model.engine.card.max_sequence_tokens,
        sampling_defaults=model.engine.card.sampling,
    )
