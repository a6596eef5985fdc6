"""`POST /v1/embeddings`."""

from typing import Annotated

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from server.dialects.embeddings import EmbeddingBuilder, check_not_empty
from server.generation.embedding_task import embedding_task
from server.generation.models import ServedModel
from server.openapi import errors, json_body
from server.routes.delivery import respond_whole
from server.routes.loading import when_loaded
from server.schemas.embeddings import EmbeddingList, EmbeddingRequest
from server.service import JsonBody, RecordDependency, ServiceDependency

router = APIRouter()

EmbeddingBody = Annotated[EmbeddingRequest, Depends(JsonBody(EmbeddingRequest))]


@router.post(
    "/v1/embeddings",
    response_model=EmbeddingList,
    responses=errors(400, 403, 404, 408, 410, 413, 429, 503),
    openapi_extra=json_body(EmbeddingRequest),
)
async def create_embeddings(
    body: EmbeddingBody, http: Request, service: ServiceDependency, record: RecordDependency
) -> Response:
    service.check_priority(body.priority)
    check_not_empty(body)

    async def begin(model: ServedModel) -> Response:
        task = await embedding_task(body, model, record)
        return await respond_whole(EmbeddingBuilder(task), http, service)

    return await when_loaded(body.model, begin, http, service)
