"""`POST /api/chat` and `/api/generate`, as Ollama has them."""

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from server.dialects.dialect import wire_json
from server.dialects.ollama.answer import Stopwatch
from server.dialects.ollama.builder import (
    OllamaBuilder,
    chat_builder,
    raw_builder,
    without_answer,
)
from server.dialects.ollama.models import LATEST
from server.dialects.ollama.request import as_chat, prompt_as_chat, raw_completion
from server.dialects.ollama.shapes import Shape, chat_answer, generate_answer
from server.generation.chat_task import chat_task
from server.generation.completion_task import completion_task
from server.generation.models import ServedModel
from server.openapi import errors, json_body, stream_of_lines
from server.record import RequestRecord
from server.routes.delivery import json_response, respond
from server.schemas.ollama.answer import (
    DoneReason,
    OllamaChatAnswer,
    OllamaError,
    OllamaGenerateAnswer,
)
from server.schemas.ollama.request import (
    OllamaAsking,
    OllamaChatRequest,
    OllamaGenerateRequest,
)
from server.service import JsonBody, RecordDependency, Service, ServiceDependency

router = APIRouter()

ChatBody = Annotated[OllamaChatRequest, Depends(JsonBody(OllamaChatRequest))]
GenerateBody = Annotated[OllamaGenerateRequest, Depends(JsonBody(OllamaGenerateRequest))]

STATUSES = (400, 404, 408, 410, 413, 429, 503)


@router.post(
    "/api/chat",
    response_model=OllamaChatAnswer,
    responses=stream_of_lines(OllamaChatAnswer, OllamaError) | errors(*STATUSES),
    openapi_extra=json_body(OllamaChatRequest),
)
async def create_chat(
    body: ChatBody, http: Request, service: ServiceDependency, record: RecordDependency
) -> Response:
    model, watch = resolved(service, body.model), Stopwatch()
    record.keep_seconds = body.keep_alive
    if not body.messages:
        return _loaded(body, model, chat_answer)
    chat = await model.workers.prepare(record, partial(as_chat, body, model))
    task = await chat_task(chat, model, record)
    return await respond(chat_builder(task, chat_answer, watch), http, service)


@router.post(
    "/api/generate",
    response_model=OllamaGenerateAnswer,
    responses=stream_of_lines(OllamaGenerateAnswer, OllamaError) | errors(*STATUSES),
    openapi_extra=json_body(OllamaGenerateRequest),
)
async def generate(
    body: GenerateBody, http: Request, service: ServiceDependency, record: RecordDependency
) -> Response:
    model, watch = resolved(service, body.model), Stopwatch()
    record.keep_seconds = body.keep_alive
    if not body.prompt:
        return _loaded(body, model, generate_answer)
    builder = await _generate_builder(body, model, record, watch)
    return await respond(builder, http, service)


def resolved(service: Service, name: str) -> ServedModel:
    """The model of that name, or of that name without the tag. Raises ApiError (404)."""
    return service.resolve(name if name in service.models else name.removesuffix(LATEST))


async def _generate_builder(
    body: OllamaGenerateRequest, model: ServedModel, record: RequestRecord, watch: Stopwatch
) -> OllamaBuilder:
    if body.raw:
        completion = await model.workers.prepare(record, partial(raw_completion, body))
        return raw_builder(await completion_task(completion, model, record), watch)
    chat = await model.workers.prepare(record, partial(prompt_as_chat, body, model))
    return chat_builder(await chat_task(chat, model, record), generate_answer, watch)


def _loaded(body: OllamaAsking, model: ServedModel, shape: Shape) -> Response:
    reason: DoneReason = "unload" if body.keep_alive == 0 else "load"
    return json_response(wire_json(without_answer(model.name, shape, reason)))
