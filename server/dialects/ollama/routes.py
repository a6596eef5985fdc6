"""Ollama's API: `/api/chat`, `generate`, `embed`, `embeddings`, and those on models."""

import time
from collections.abc import Sequence
from functools import partial

from anyio import current_time, to_thread
from fastapi import Request
from pydantic_core import to_json
from starlette.responses import Response

from engine.launch import local_checkpoint
from engine.values.request import Request as EngineRequest
from server.dialects.endpoint import GENERATION_ERRORS, MODEL_ERRORS, Endpoints, json_lines
from server.dialects.errors import OllamaError
from server.dialects.job import (
    Begin,
    Job,
    KeepAlive,
    json_response,
    respond,
    when_loaded,
    wire_json,
)
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
    OllamaChatAnswer,
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateAnswer,
    OllamaGenerateRequest,
    OllamaGenerationRequest,
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
    EmbedForm,
    Shape,
    answer_job,
    chat_shape,
    empty_line,
    generate_shape,
    one_vector,
    vectors_job,
    without_answer,
)
from server.errors import ApiError
from server.generation.pooling import embedding_requests
from server.generation.requests import ServedModel, prepare_chat, prepare_completion
from server.http.stream import NDJSON, DeferredStream, written
from server.models.hub import Download, NotCached, deletions
from server.record import RequestRecord
from server.service import RecordDependency, Service, ServiceDependency

router = Endpoints()
models_router = Endpoints()


@router.endpoint(
    "POST",
    "/api/chat",
    answer=OllamaChatAnswer,
    stream=json_lines(OllamaChatAnswer, OllamaError),
    errors=GENERATION_ERRORS,
)
async def create_chat(
    body: OllamaChatRequest, http: Request, service: ServiceDependency, record: RecordDependency
) -> Response:
    arrived_ns = time.perf_counter_ns()
    record.keep_alive_seconds = body.keep_alive
    if not body.messages and body.keep_alive == 0:
        return await _unloaded(body, service, record, chat_shape)

    async def begin(model: ServedModel) -> Response:
        if not body.messages:
            return _answer_of(model.name, chat_shape, "load")
        chat = await model.workers.prepare(record, partial(as_chat, body, model))
        request, plan = await prepare_chat(chat, model, record)
        job = answer_job(model, [request], plan, chat_shape, arrived_ns, is_streamed=body.stream)
        return await respond(job, http, service)

    return await _when_loaded(body, chat_shape, begin, http, service)


@router.endpoint(
    "POST",
    "/api/generate",
    answer=OllamaGenerateAnswer,
    stream=json_lines(OllamaGenerateAnswer, OllamaError),
    errors=GENERATION_ERRORS,
)
async def generate(
    body: OllamaGenerateRequest, http: Request, service: ServiceDependency, record: RecordDependency
) -> Response:
    arrived_ns = time.perf_counter_ns()
    record.keep_alive_seconds = body.keep_alive
    if not body.prompt and body.keep_alive == 0:
        return await _unloaded(body, service, record, generate_shape)

    async def begin(model: ServedModel) -> Response:
        if not body.prompt:
            return _answer_of(model.name, generate_shape, "load")
        job = await _generate_job(body, model, record, arrived_ns)
        return await respond(job, http, service)

    return await _when_loaded(body, generate_shape, begin, http, service)


async def _when_loaded(
    body: OllamaGenerationRequest, shape: Shape, begin: Begin, http: Request, service: Service
) -> Response:
    """The response of the model that the body names. A stream has empty lines while it loads."""
    name = named(service, body.model)

    def line() -> bytes:
        return empty_line(name or service.models.find(name).name, shape)

    keep_alive = KeepAlive(NDJSON, line) if body.stream else None
    return await when_loaded(name, begin, http, service, keep_alive)


def named(service: Service, name: str) -> str:
    """The name without the tag that Ollama's clients add, where no model has it."""
    return name if service.models.has(name) else name.removesuffix(LATEST)


async def _generate_job(
    body: OllamaGenerateRequest, model: ServedModel, record: RequestRecord, arrived_ns: int
) -> Job:
    requests: Sequence[EngineRequest]
    if body.raw:
        completion = await model.workers.prepare(record, partial(raw_completion, body, model))
        requests, _ = await prepare_completion(completion, model, record)
        plan = None
    else:
        chat = await model.workers.prepare(record, partial(prompt_as_chat, body, model))
        request, plan = await prepare_chat(chat, model, record)
        requests = [request]
    return answer_job(model, requests, plan, generate_shape, arrived_ns, is_streamed=body.stream)


async def _unloaded(
    body: OllamaGenerationRequest, service: Service, record: RecordDependency, shape: Shape
) -> Response:
    """Answers at once. An admin unloads the model as soon as its running requests have ended. Any
    other key withdraws its own wishes to keep the model, which other keys' wishes still hold.
    """
    name = named(service, body.model)
    model = await service.chosen(name, record)
    if service.is_admin(record):
        service.models.pool.begin_unload(model)
    else:
        service.models.pool.withdraw(model, record.key)
    return _answer_of(name, shape, "unload")


def _answer_of(name: str, shape: Shape, reason: DoneReason) -> Response:
    return json_response(without_answer(name, shape, reason))


@router.endpoint("POST", "/api/embed", answer=OllamaVectors, errors=GENERATION_ERRORS)
async def embed(
    body: OllamaEmbedRequest, http: Request, service: ServiceDependency, record: RecordDependency
) -> Response:
    """Without a text the model is loaded, and no more."""
    arrived_ns = time.perf_counter_ns()
    record.keep_alive_seconds = body.keep_alive

    async def begin(model: ServedModel) -> Response:
        if not body.texts:
            return json_response(to_json(EmbedForm(model.name, arrived_ns).fields([], None)))
        asked = as_embedding(body, body.texts, body.dimensions)
        requests = await embedding_requests(asked, model, record)
        form = EmbedForm(model.name, arrived_ns)
        return await respond(
            vectors_job(model, requests, body.dimensions, form.fields), http, service
        )

    return await when_loaded(named(service, body.model), begin, http, service)


@router.endpoint("POST", "/api/embeddings", answer=OllamaVector, errors=GENERATION_ERRORS)
async def embeddings(
    body: OllamaEmbeddingsRequest,
    http: Request,
    service: ServiceDependency,
    record: RecordDependency,
) -> Response:
    """Without a prompt the model is loaded, and no more."""
    record.keep_alive_seconds = body.keep_alive

    async def begin(model: ServedModel) -> Response:
        if not body.prompt:
            return json_response(wire_json(OllamaVector(embedding=[])))
        asked = as_embedding(body, [body.prompt], None)
        requests = await embedding_requests(asked, model, record)
        return await respond(vectors_job(model, requests, None, one_vector), http, service)

    return await when_loaded(named(service, body.model), begin, http, service)


API_VERSION = "0.12.11"
"""Of Ollama: the first whose chats have log-probabilities, which are the latest of what is here."""


@models_router.endpoint("GET", "/api/version", errors=None)
async def version() -> OllamaVersion:
    return OllamaVersion(version=API_VERSION)


@models_router.endpoint("GET", "/api/tags")
async def tags(service: ServiceDependency, record: RecordDependency) -> OllamaModels:
    """The models that are served, under each of their names."""
    allowed = list(service.models.named(record.principal.allowed_models))

    def read() -> OllamaModels:
        return OllamaModels(models=[listed(name, model.settings.source) for name, model in allowed])

    return await service.workers.run(record.client, 0, read)


@models_router.endpoint("GET", "/api/ps")
async def ps(service: ServiceDependency, record: RecordDependency) -> OllamaRunningModels:
    """The models that are loaded and that the key may use, under the first of their names."""
    found = []
    for name, loaded in service.models.all_loaded().items():
        if not loaded.model.is_allowed(name, record.principal.allowed_models):
            continue
        memory = (await loaded.engine.stats()).memory.model
        left = loaded.model.seconds_left(current_time())
        source = loaded.model.settings.source
        read = partial(running, loaded.served[name], source, memory, left)
        found.append(await service.workers.run(record.client, 0, read))
    return OllamaRunningModels(models=found)


@models_router.endpoint("POST", "/api/show", errors=MODEL_ERRORS)
async def show(
    body: OllamaShowRequest, service: ServiceDependency, record: RecordDependency
) -> OllamaModelInfo:
    """Loads nothing: it says what the model's files say, loaded or not."""
    name = named(service, body.named)
    model = await service.chosen(name, record)
    read = partial(described, name or model.name, model.settings, model.card)
    return await service.workers.run(record.client, 0, read)


@models_router.endpoint(
    "POST", "/api/pull", answer=OllamaProgress, stream=json_lines(OllamaProgress, OllamaError)
)
async def pull(
    body: OllamaPullRequest, service: ServiceDependency, record: RecordDependency
) -> Response:
    """As `rootstock pull` does. It goes on if the client leaves, and ends when the daemon stops.
    The name is that of a repository, or of a served model, which may come from a directory.
    """
    download = await _download(service, named(service, body.named))
    if body.stream:
        record.never_ends()
        lines = written(pull_lines(download))
        return DeferredStream(NDJSON, lines, service.settings.keepalive_seconds, keep_alive=bytes)
    await pulled(download)
    return json_response(wire_json(SUCCESS))


async def _download(service: Service, name: str) -> Download | None:
    """None for a served model whose files are in a directory: there is nothing to fetch."""
    models = service.models
    if not models.has(name):
        return models.downloads.start(repository(name))
    source = models.find(name).settings.source
    if await to_thread.run_sync(local_checkpoint, source) is not None:
        return None
    return models.downloads.start(source)


@models_router.endpoint("DELETE", "/api/delete", errors=(404, 409))
async def delete(body: OllamaModelRequest, service: ServiceDependency) -> Response:
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
