"""`GET /v1/models`, `GET /v1/models/{id}`."""

from fastapi import APIRouter

from server.openapi import errors
from server.schemas.models import Model, ModelList
from server.service import Service, ServiceDependency

router = APIRouter()


@router.head("/v1/models", include_in_schema=False)
@router.get("/v1/models", responses=errors(503))
async def list_models(service: ServiceDependency) -> ModelList:
    return ModelList(object="list", data=[_model(service)])


@router.head("/v1/models/{id:path}", include_in_schema=False)
@router.get("/v1/models/{id:path}", responses=errors(404, 503))
async def get_model(id: str, service: ServiceDependency) -> Model:
    service.check_model(id)
    return _model(service)


def _model(service: Service) -> Model:
    return Model(
        id=service.model,
        object="model",
        created=service.created,
        owned_by="rootstock",
        sampling_defaults=service.engine.card.sampling,
    )
