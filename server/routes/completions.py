"""`POST /v1/completions`."""

from typing import Annotated

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from server.dialects.completions import CompletionBuilder
from server.generation.completion_task import completion_task
from server.generation.models import ServedModel
from server.openapi import errors, json_body, stream_of
from server.routes.delivery import respond
from server.routes.loading import stream_when_loaded, when_loaded
from server.schemas.completions import Completion, CompletionChunk, CompletionRequest
from server.service import JsonBody, RecordDependency, ServiceDependency

router = APIRouter()

CompletionBody = Annotated[CompletionRequest, Depends(JsonBody(CompletionRequest))]


@router.post(
    "/v1/completions",
    response_model=Completion,
    responses=stream_of(CompletionChunk) | errors(400, 403, 404, 408, 410, 413, 429, 503),
    openapi_extra=json_body(CompletionRequest),
)
async def create_completion(
    body: CompletionBody, http: Request, service: ServiceDependency, record: RecordDependency
) -> Response:
    service.check_priority(body.priority)

    async def begin(model: ServedModel) -> Response:
        task = await completion_task(body, model, record)
        return await respond(CompletionBuilder(task), http, service)

    answer = stream_when_loaded if body.stream else when_loaded
    return await answer(body.model, begin, http, service)
