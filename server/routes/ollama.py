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
    empty_line,
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
from server.routes.loading import Begin, stream_when_loaded, when_loaded
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
from server.transport.sse import NDJSON

router = APIRouter()

ChatBody = Annotated[OllamaChatRequest, Depends(JsonBody(OllamaChatRequest))]
GenerateBody = Annotated[OllamaGenerateRequest, Depends(JsonBody(OllamaGenerateRequest))]

STATUSES = (400, 403, 404, 408, 410, 413, 429, 503)


@router.post(
    "/api/chat",
    response_model=OllamaChatAnswer,
    responses=stream_of_lines(OllamaChatAnswer, OllamaError) | errors(*STATUSES),
    openapi_extra=json_body(OllamaChatRequest),
)
async def create_chat(
    body: ChatBody, http: Request, service: ServiceDependency, record: RecordDependency
) -> Response:
    watch = Stopwatch()
    record.keep_alive_seconds = body.keep_alive
    if not body.messages and body.keep_alive == 0:
        return await _unloaded(body, service, record, chat_answer)

    async def begin(model: ServedModel) -> Response:
        if not body.messages:
            return _answer_of(model.name, chat_answer, "load")
        chat = await model.workers.prepare(record, partial(as_chat, body, model))
        task = await chat_task(chat, model, record)
        return await respond(chat_builder(task, chat_answer, watch), http, service)

    return await _when_loaded(body, chat_answer, begin, http, service)


@router.post(
    "/api/generate",
    response_model=OllamaGenerateAnswer,
    responses=stream_of_lines(OllamaGenerateAnswer, OllamaError) | errors(*STATUSES),
    openapi_extra=json_body(OllamaGenerateRequest),
)
async def generate(
    body: GenerateBody, http: Request, service: ServiceDependency, record: RecordDependency
) -> Response:
    watch = Stopwatch()
    record.keep_alive_seconds = body.keep_alive
    if not body.prompt and body.keep_alive == 0:
        return await _unloaded(body, service, record, generate_answer)

    async def begin(model: ServedModel) -> Response:
        if not body.prompt:
            return _answer_of(model.name, generate_answer, "load")
        builder = await _generate_builder(body, model, record, watch)
        return await respond(builder, http, service)

    return await _when_loaded(body, generate_answer, begin, http, service)


async def _when_loaded(
    body: OllamaAsking, shape: Shape, begin: Begin, http: Request, service: Service
) -> Response:
    """The response of the model that the body names. A stream has empty lines while it loads."""
    name = named(service, body.model)
    if not body.stream:
        return await when_loaded(name, begin, http, service)

    def line() -> bytes:
        return empty_line(service.models.naming(name).name, shape)

    return await stream_when_loaded(name, begin, http, service, NDJSON, line)


def named(service: Service, name: str) -> str:
    """The name without the tag that Ollama's clients add, where no model has it."""
    return name if service.models.has(name) else name.removesuffix(LATEST)


async def _generate_builder(
    body: OllamaGenerateRequest, model: ServedModel, record: RequestRecord, watch: Stopwatch
) -> OllamaBuilder:
    if body.raw:
        completion = await model.workers.prepare(record, partial(raw_completion, body))
        return raw_builder(await completion_task(completion, model, record), watch)
    chat = await model.workers.prepare(record, partial(prompt_as_chat, body, model))
    return chat_builder(await chat_task(chat, model, record), generate_answer, watch)


async def _unloaded(
    body: OllamaAsking, service: Service, record: RecordDependency, shape: Shape
) -> Response:
    """Answers at once. An admin unloads the model as soon as its running requests have ended. Any
    other key withdraws its own wishes to keep the model, which other keys' wishes still hold.
    """
    name = named(service, body.model)
    own = await service.chosen(name, record)
    if service.is_admin(record):
        service.models.pool.begin_unload(own)
    else:
        service.models.pool.withdraw(own, record.key)
    return _answer_of(name, shape, "unload")


def _answer_of(name: str, shape: Shape, reason: DoneReason) -> Response:
    return json_response(wire_json(without_answer(name, shape, reason)))
