"""`POST /v1/completions`, and its `/render`."""

from fastapi import Request
from starlette.responses import Response

from server.dialects.completions.schema import Completion, CompletionChunk, CompletionRequest
from server.dialects.completions.write import completion_job
from server.dialects.endpoint import GENERATION_ERRORS, MODEL_ERRORS, Endpoints, chunks
from server.dialects.job import (
    COMMENTS,
    respond,
    respond_without_engine,
    when_loaded,
)
from server.dialects.openai import RenderedRequests, check_requests, rendered_request
from server.generation.requests import ServedModel, prepare_completion
from server.generation.stream import TOKEN_BYTES
from server.service import RecordDependency, ServiceDependency

router = Endpoints()
render_router = Endpoints()


@router.endpoint(
    "POST",
    "/v1/completions",
    answer=Completion,
    stream=chunks(CompletionChunk),
    errors=GENERATION_ERRORS,
)
async def create_completion(
    body: CompletionRequest, http: Request, service: ServiceDependency, record: RecordDependency
) -> Response:
    service.check_priority(body.priority)

    async def begin(model: ServedModel) -> Response:
        requests, echoes = await prepare_completion(body.completion, model, record)
        job = completion_job(body, model, requests, echoes, record.id)
        return await respond(job, http, service)

    keep_alive = COMMENTS if body.stream else None
    return await when_loaded(body.model, begin, http, service, keep_alive)


@render_router.endpoint(
    "POST", "/v1/completions/render", answer=RenderedRequests, errors=MODEL_ERRORS
)
async def render_completion(
    body: CompletionRequest, http: Request, service: ServiceDependency, record: RecordDependency
) -> Response:
    """One entry for each prompt."""
    model = await service.model(body.model, record)
    service.check_priority(body.priority)
    requests, _ = await prepare_completion(body.completion, model, record)
    await check_requests(requests, model, record)
    return await respond_without_engine(
        lambda: RenderedRequests([rendered_request(each, body, model.name) for each in requests]),
        TOKEN_BYTES * sum(len(each.prompt) for each in requests),
        http,
        service,
    )
