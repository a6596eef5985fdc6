"""Ollama's API: `/api/chat`, `generate`, `embed`, `embeddings`, and those on models."""

import time
from collections.abc import Sequence
from functools import partial

from anyio import current_time, to_thread
from pydantic_core import to_json
from starlette.responses import Response

from engine.launch import local_checkpoint
from engine.values.request import Request as EngineRequest
from server.dialects.endpoint import MODEL_ERRORS, Endpoints, json_lines
from server.dialects.errors import OllamaError
from server.dialects.job import (
    Job,
    KeepAlive,
    MakeJob,
    json_response,
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
from server.service import Context, RequestContext, Service

router = Endpoints()
models_router = Endpoints()


@router.generation(
    "/api/chat", answer=OllamaChatAnswer, stream=json_lines(OllamaChatAnswer, OllamaError)
)
async def create_chat(body: OllamaChatRequest, context: Context) -> Response:
    arrived_ns = time.perf_counter_ns()

    async def make(model: ServedModel) -> Job:
        chat = await model.workers.prepare(context.record, partial(as_chat, body, model))
        request, plan = await prepare_chat(chat, model, context.record)
        return answer_job(model, [request], plan, chat_shape, arrived_ns, is_streamed=body.stream)

    return await _answered(body, chat_shape, make if body.messages else None, context)


@router.generation(
    "/api/generate",
    answer=OllamaGenerateAnswer,
    stream=json_lines(OllamaGenerateAnswer, OllamaError),
)
async def generate(body: OllamaGenerateRequest, context: Context) -> Response:
    arrived_ns = time.perf_counter_ns()

    async def make(model: ServedModel) -> Job:
        return await _generate_job(body, model, context.record, arrived_ns)

    return await _answered(body, generate_shape, make if body.prompt else None, context)


async def _answered(
    body: OllamaGenerationRequest, shape: Shape, make: MakeJob | None, context: RequestContext
) -> Response:
    """The response of the model that the body names. A stream has empty lines while it loads.

    Without anything to answer, and so without `make`, the model is only loaded; or unloaded, if it
    is not to stay.
    """
    service = context.service
    context.record.keep_alive_seconds = body.keep_alive
    if make is None and body.keep_alive == 0:
        return await _unloaded(body, context, shape)
    name = named(service, body.model)

    async def loaded(model: ServedModel) -> bytes:
        return without_answer(model.name, shape, "load")

    def line() -> bytes:
        return empty_line(name or service.models.find(name).name, shape)

    keep_alive = KeepAlive(NDJSON, line) if body.stream else None
    return await when_loaded(name, make or loaded, context, keep_alive)


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
    body: OllamaGenerationRequest, context: RequestContext, shape: Shape
) -> Response:
    """Answers at once. An admin unloads the model as soon as its running requests have ended. Any
    other key withdraws its own wishes to keep the model, which other keys' wishes still hold.
    """
    service, record = context.service, context.record
    name = named(service, body.model)
    model = await service.chosen(name, record)
    if service.is_admin(record):
        service.models.pool.begin_unload(model)
    else:
        service.models.pool.withdraw(model, record.key)
    return json_response(without_answer(name, shape, "unload"))


@router.generation("/api/embed", answer=OllamaVectors)
async def embed(body: OllamaEmbedRequest, context: Context) -> Response:
    """Embeds texts. Without a text it only loads the model."""
    arrived_ns = time.perf_counter_ns()
    context.record.keep_alive_seconds = body.keep_alive

    async def make(model: ServedModel) -> Job | bytes:
        if not body.texts:
            return to_json(EmbedForm(model.name, arrived_ns).fields([], None))
        asked = as_embedding(body, body.texts, body.dimensions)
        requests = await embedding_requests(asked, model, context.record)
        form = EmbedForm(model.name, arrived_ns)
        return vectors_job(model, requests, body.dimensions, form.fields)

    return await when_loaded(named(context.service, body.model), make, context)


@router.generation("/api/embeddings", answer=OllamaVector)
async def embeddings(body: OllamaEmbeddingsRequest, context: Context) -> Response:
    """Embeds a prompt. Without a prompt it only loads the model."""
    context.record.keep_alive_seconds = body.keep_alive

    async def make(model: ServedModel) -> Job | bytes:
        if not body.prompt:
            return wire_json(OllamaVector(embedding=[]))
        asked = as_embedding(body, [body.prompt], None)
        requests = await embedding_requests(asked, model, context.record)
        return vectors_job(model, requests, None, one_vector)

    return await when_loaded(named(context.service, body.model), make, context)


API_VERSION = "0.12.11"
"""The version of Ollama's API: the first one with log-probabilities in chats, the latest
feature served here.
"""


@models_router.endpoint("GET", "/api/version", errors=None)
async def version() -> OllamaVersion:
    return OllamaVersion(version=API_VERSION)


@models_router.endpoint("GET", "/api/tags")
async def tags(context: Context) -> OllamaModels:
    """The models that are served, under each of their names."""
    await context.service.models.discover_all()
    allowed = list(context.service.models.named(context.record.principal.allowed_models))

    def read() -> OllamaModels:
        return OllamaModels(models=[listed(name, model.settings.source) for name, model in allowed])

    return await context.service.workers.run(context.record.client, 0, read)


@models_router.endpoint("GET", "/api/ps")
async def ps(context: Context) -> OllamaRunningModels:
    """The models that are loaded and that the key may use, under the first of their names."""
    found = []
    for name, loaded in context.service.models.all_loaded().items():
        if not loaded.model.is_allowed(name, context.record.principal.allowed_models):
            continue
        memory = (await loaded.engine.stats()).memory.model
        left = loaded.model.seconds_left(current_time())
        source = loaded.model.settings.source
        read = partial(running, loaded.served[name], source, memory, left)
        found.append(await context.service.workers.run(context.record.client, 0, read))
    return OllamaRunningModels(models=found)


@models_router.endpoint("POST", "/api/show", errors=MODEL_ERRORS)
async def show(body: OllamaShowRequest, context: Context) -> OllamaModelInfo:
    """Loads nothing: the answer comes from the model's files."""
    name = named(context.service, body.named)
    model = await context.service.chosen(name, context.record)
    read = partial(described, name or model.name, model.settings, model.card)
    return await context.service.workers.run(context.record.client, 0, read)


@models_router.endpoint(
    "POST", "/api/pull", answer=OllamaProgress, stream=json_lines(OllamaProgress, OllamaError)
)
async def pull(body: OllamaPullRequest, context: Context) -> Response:
    """Downloads like `rootstock pull`. A download continues if the client leaves, and ends when the
    daemon stops. The name is a repository or a served model, which may be a directory.
    """
    download = await _download(context.service, named(context.service, body.named))
    if body.stream:
        context.record.never_ends()
        lines = written(pull_lines(download))
        return DeferredStream(
            NDJSON, lines, context.service.settings.keepalive_seconds, keep_alive=bytes
        )
    await pulled(download)
    return json_response(wire_json(SUCCESS))


async def _download(service: Service, name: str) -> Download | None:
    """The download of a model; None for a served model in a directory."""
    models = service.models
    if not models.has(name):
        return models.downloads.start(repository(name))
    source = models.find(name).settings.source
    if await to_thread.run_sync(local_checkpoint, source) is not None:
        return None
    return models.downloads.start(source)


@models_router.endpoint("DELETE", "/api/delete", errors=(404, 409))
async def delete(body: OllamaModelRequest, context: Context) -> Response:
    """Deletes a repository from Hugging Face's cache, every revision of it, unless it is served."""
    name = repository(body.named)
    if context.service.models.is_served_from(name):
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
