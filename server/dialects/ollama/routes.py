"""Ollama's API: `/api/chat`, `generate`, `embed`, `embeddings`, and those on models."""

from functools import partial
from typing import Annotated

from anyio import to_thread
from fastapi import APIRouter, Depends, Request
from starlette.responses import Response, StreamingResponse

from engine.launch import local_checkpoint
from server.dialects.base import wire_json
from server.dialects.delivery import json_response, respond, respond_whole
from server.dialects.endpoint import errors, json_body, stream_of_lines
from server.dialects.errors import OllamaError
from server.dialects.loading import Begin, stream_when_loaded, when_loaded
from server.dialects.ollama.models import (
    LATEST,
    SUCCESS,
    described,
    listed,
    pull_lines,
    pulled,
    repository,
    running,
)
from server.dialects.ollama.read import as_chat, as_embedding, prompt_as_chat, raw_completion
from server.dialects.ollama.schema import (
    DoneReason,
    OllamaAsking,
    OllamaChatAnswer,
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateAnswer,
    OllamaGenerateRequest,
    OllamaModelInfo,
    OllamaModelRequest,
    OllamaModels,
    OllamaProgress,
    OllamaPullRequest,
    OllamaRunningModels,
    OllamaShowRequest,
    OllamaVector,
    OllamaVectors,
    OllamaVersion,
)
from server.dialects.ollama.write import (
    EmbedBuilder,
    EmbeddingsBuilder,
    OllamaBuilder,
    Shape,
    Stopwatch,
    chat_answer,
    chat_builder,
    empty_line,
    generate_answer,
    raw_builder,
    without_answer,
)
from server.downloads import Download
from server.errors import ApiError
from server.generation.chat_task import chat_task
from server.generation.completion_task import completion_task
from server.generation.embedding_task import embedding_task
from server.generation.models import ServedModel
from server.model_cache import NotCached, deletions
from server.record import RequestRecord
from server.service import JsonBody, RecordDependency, Service, ServiceDependency
from server.transport.sse import NDJSON

router = APIRouter()

models_router = APIRouter()

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


EmbedBody = Annotated[OllamaEmbedRequest, Depends(JsonBody(OllamaEmbedRequest))]
EmbeddingsBody = Annotated[OllamaEmbeddingsRequest, Depends(JsonBody(OllamaEmbeddingsRequest))]


@router.post(
    "/api/embed",
    response_model=OllamaVectors,
    responses=errors(*STATUSES),
    openapi_extra=json_body(OllamaEmbedRequest),
)
async def embed(
    body: EmbedBody, http: Request, service: ServiceDependency, record: RecordDependency
) -> Response:
    """Without a text the model is loaded, and no more."""
    watch = Stopwatch()
    record.keep_alive_seconds = body.keep_alive

    async def begin(model: ServedModel) -> Response:
        if not body.texts:
            return json_response(wire_json(_no_vectors(model.name, watch)))
        asked = as_embedding(body, body.texts, body.dimensions)
        task = await embedding_task(asked, model, record)
        return await respond_whole(EmbedBuilder(task, watch), http, service)

    return await when_loaded(named(service, body.model), begin, http, service)


@router.post(
    "/api/embeddings",
    response_model=OllamaVector,
    responses=errors(*STATUSES),
    openapi_extra=json_body(OllamaEmbeddingsRequest),
)
async def embeddings(
    body: EmbeddingsBody, http: Request, service: ServiceDependency, record: RecordDependency
) -> Response:
    """Without a prompt the model is loaded, and no more."""
    watch = Stopwatch()
    record.keep_alive_seconds = body.keep_alive

    async def begin(model: ServedModel) -> Response:
        if not body.prompt:
            return json_response(wire_json(OllamaVector(embedding=[])))
        task = await embedding_task(as_embedding(body, [body.prompt], None), model, record)
        return await respond_whole(EmbeddingsBuilder(task, watch), http, service)

    return await when_loaded(named(service, body.model), begin, http, service)


def _no_vectors(model: str, watch: Stopwatch) -> OllamaVectors:
    watch.asked()
    durations = watch.durations()
    return OllamaVectors(
        model=model,
        embeddings=[],
        total_duration=durations["total_duration"],
        load_duration=durations["load_duration"],
        prompt_eval_count=0,
    )


API_VERSION = "0.12.11"
"""Of Ollama: the first whose chats have log-probabilities, which are the latest of what is here."""

ShowBody = Annotated[OllamaShowRequest, Depends(JsonBody(OllamaShowRequest))]
ModelBody = Annotated[OllamaModelRequest, Depends(JsonBody(OllamaModelRequest))]
PullBody = Annotated[OllamaPullRequest, Depends(JsonBody(OllamaPullRequest))]


@models_router.head("/api/version", include_in_schema=False)
@models_router.get("/api/version")
async def version() -> OllamaVersion:
    return OllamaVersion(version=API_VERSION)


@models_router.head("/api/tags", include_in_schema=False)
@models_router.get("/api/tags", responses=errors(503))
async def tags(service: ServiceDependency, record: RecordDependency) -> OllamaModels:
    """The models that are served, under each of their names."""
    models = service.models
    allowed = [
        (name, models.known[own])
        for name, own in models.names()
        if models.is_among(name, record.allowed_models)
    ]

    def read() -> OllamaModels:
        return OllamaModels(models=[listed(name, one.settings.source) for name, one in allowed])

    return await service.workers.run(record.client, 0, read)


@models_router.head("/api/ps", include_in_schema=False)
@models_router.get("/api/ps", responses=errors(503))
async def ps(service: ServiceDependency, record: RecordDependency) -> OllamaRunningModels:
    """The models that are loaded and that the key may use, under the first of their names."""
    found = []
    for name, loaded in service.models.all_loaded().items():
        if not service.models.is_among(name, record.allowed_models):
            continue
        promise = (await loaded.engine.stats()).memory.promise
        left = service.models.seconds_left(name)
        source = loaded.known.settings.source
        read = partial(running, loaded.served[name], source, promise, left)
        found.append(await service.workers.run(record.client, 0, read))
    return OllamaRunningModels(models=found)


@models_router.post(
    "/api/show",
    responses=errors(400, 403, 404, 408, 413, 503),
    openapi_extra=json_body(OllamaShowRequest),
)
async def show(
    body: ShowBody, service: ServiceDependency, record: RecordDependency
) -> OllamaModelInfo:
    """Loads nothing: it says what the model's files say, loaded or not."""
    name = named(service, body.named)
    own = await service.chosen(name, record)
    known = service.models.known[own]
    read = partial(described, name or own, known.settings, known.card)
    return await service.workers.run(record.client, 0, read)


@models_router.post(
    "/api/pull",
    response_model=OllamaProgress,
    responses=stream_of_lines(OllamaProgress, OllamaError) | errors(400, 408, 413, 503),
    openapi_extra=json_body(OllamaPullRequest),
)
async def pull(body: PullBody, service: ServiceDependency) -> Response:
    """As `rootstock pull` does. It goes on if the client leaves, and ends when the daemon stops.
    The name is that of a repository, or of a served model, which may come from a directory.
    """
    download = await _download(service, named(service, body.named))
    if body.stream:
        return StreamingResponse(pull_lines(download), media_type=NDJSON)
    await pulled(download)
    return json_response(wire_json(SUCCESS))


async def _download(service: Service, name: str) -> Download | None:
    """None for a served model whose files are in a directory: there is nothing to fetch."""
    models = service.models
    if not models.has(name):
        return models.downloads.start(repository(name))
    source = models.known[models.find(name)].settings.source
    if await to_thread.run_sync(local_checkpoint, source) is not None:
        return None
    return models.downloads.start(source)


@models_router.delete(
    "/api/delete",
    responses=errors(400, 404, 408, 409, 413, 503),
    openapi_extra=json_body(OllamaModelRequest),
)
async def delete(body: ModelBody, service: ServiceDependency) -> Response:
    """Deletes a repository from Hugging Face's cache, every revision of it, unless it is served."""
    name = repository(body.named)
    if service.models.is_served_from(name):
        raise ApiError(409, f"model '{name}' is served", param="model", code="model_served")
    await to_thread.run_sync(_delete, name)
    return Response()


def _delete(name: str) -> None:
    """Raises ApiError (404)."""
    try:
        strategies = deletions([name])
    except NotCached as error:
        raise ApiError(404, f"model '{name}' not found", code="model_not_found") from error
    for strategy in strategies:
        strategy.execute()
