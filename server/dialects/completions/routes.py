"""`POST /v1/completions`, and its `/render`."""

from typing import Annotated

from fastapi import APIRouter, Depends, Request
from fastapi import Request as HttpRequest
from starlette.responses import Response

from server.dialects.completions.schema import Completion, CompletionChunk
from server.dialects.completions.write import CompletionBuilder
from server.dialects.delivery import respond, respond_without_engine
from server.dialects.endpoint import errors, json_body, stream_of
from server.dialects.loading import stream_when_loaded, when_loaded
from server.dialects.rendering import RenderedRequests, check_requests, rendered_request
from server.generation.completion_request import CompletionRequest
from server.generation.completion_task import completion_task
from server.generation.models import ServedModel
from server.service import JsonBody, RecordDependency, ServiceDependency
from server.transport.unsent import TOKEN_BYTES

router = APIRouter()
render_router = APIRouter()

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


@render_router.post(
    "/v1/completions/render",
    response_model=RenderedRequests,
    responses=errors(400, 403, 404, 408, 413, 503),
    openapi_extra=json_body(CompletionRequest),
)
async def render_completion(
    body: CompletionBody, http: HttpRequest, service: ServiceDependency, record: RecordDependency
) -> Response:
    """One entry for each prompt."""
    model = await service.model(body.model, record)
    service.check_priority(body.priority)
    task = await completion_task(body, model, record)
    await check_requests(task.requests, model, record)
    return await respond_without_engine(
        lambda: RenderedRequests(
            [rendered_request(each, body, model.name) for each in task.requests]
        ),
        TOKEN_BYTES * sum(map(len, task.prompts)),
        http,
        service,
    )
