"""`POST /v1/chat/completions`."""

from typing import Annotated

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from server.dialects.chat import ChatBuilder
from server.dialects.chat_request import as_chat
from server.generation.chat_task import chat_task
from server.generation.models import ServedModel
from server.openapi import errors, json_body, stream_of
from server.routes.delivery import respond
from server.routes.loading import stream_when_loaded, when_loaded
from server.schemas.chat import ChatChunk, ChatCompletion, ChatRequest
from server.service import JsonBody, RecordDependency, ServiceDependency

router = APIRouter()

ChatBody = Annotated[ChatRequest, Depends(JsonBody(ChatRequest))]


@router.post(
    "/v1/chat/completions",
    response_model=ChatCompletion,
    responses=stream_of(ChatChunk) | errors(400, 403, 404, 408, 410, 413, 429, 503),
    openapi_extra=json_body(ChatRequest),
)
async def create_chat_completion(
    body: ChatBody, http: Request, service: ServiceDependency, record: RecordDependency
) -> Response:
    service.check_priority(body.priority)

    async def begin(model: ServedModel) -> Response:
        task = await chat_task(as_chat(body), model, record)
        return await respond(ChatBuilder(body, task), http, service)

    answer = stream_when_loaded if body.stream else when_loaded
    return await answer(body.model, begin, http, service)
