"""Ollama's API: `/api/chat`, `generate`, `embed`, `embeddings`, and those on models."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

from anyio import current_time, to_thread
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import to_json
from starlette.responses import Response

from engine.launch import local_checkpoint
from engine.values.request import Request as EngineRequest
from server.dialects.endpoint import GENERATION_ERRORS, MODEL_ERRORS, Endpoints, json_lines
from server.dialects.error_shapes import OllamaError
from server.dialects.job import (
    Job,
    KeepAlive,
    json_response,
    respond,
)
from server.dialects.ollama.catalog import (
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
from server.dialects.ollama.schema import KeepAlive as Duration
from server.dialects.ollama.schema import (
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
from server.dialects.openai import dropped_kinds
from server.errors import ApiError
from server.generation.foreign_history import log_dropped
from server.generation.pooling import embedding_requests
from server.generation.requests import ServedModel, prepare_chat, prepare_completion
from server.http.stream import NDJSON, DeferredStream, client_waiting, written
from server.json_model import RequestModel
from server.models.hub import Download, NotCached, deletions
from server.record import RequestRecord
from server.service import ArrivedBody, Context, Prepare, RequestContext, Service

BodyT = TypeVar("BodyT", bound=RequestModel)

router = Endpoints()
models_router = Endpoints()


KEEP_ALIVE = TypeAdapter[float | None](Duration | None, config=ConfigDict(strict=True))


@router.endpoint(
    "POST",
    "/api/chat",
    body=OllamaChatRequest,
    answer=OllamaChatAnswer,
    stream=json_lines(OllamaChatAnswer, OllamaError),
    errors=GENERATION_ERRORS,
)
async def create_chat(context: Context) -> Response:
    def prepare(body: OllamaChatRequest, model: ServedModel, record: RequestRecord) -> Job | bytes:
        if not body.messages:
            return without_answer(model.name, chat_shape, "load")
        log_dropped(dropped_kinds(body.tools), record.id)
        request, plan = prepare_chat(as_chat(body, model), model, record)
        return answer_job(
            model, [request], plan, chat_shape, record.arrived_ns, is_streamed=body.stream
        )

    body = await context.arrived(OllamaChatRequest)
    return await _answered(body, chat_shape, prepare, lambda body: not body.messages, context)


@router.endpoint(
    "POST",
    "/api/generate",
    body=OllamaGenerateRequest,
    answer=OllamaGenerateAnswer,
    stream=json_lines(OllamaGenerateAnswer, OllamaError),
    errors=GENERATION_ERRORS,
)
async def generate(context: Context) -> Response:
    body = await context.arrived(OllamaGenerateRequest)

    def is_empty(body: OllamaGenerateRequest) -> bool:
        return not body.prompt and not body.images

    return await _answered(body, generate_shape, _generate_job, is_empty, context)


async def _answered(
    body: ArrivedBody[BodyT],
    shape: Shape,
    prepare: Prepare[BodyT, Job | bytes],
    is_empty: Callable[[BodyT], bool],
    context: RequestContext,
) -> Response:
    """The response of the model that the body names. A stream has empty lines while it loads.

    Without anything to answer the model is only loaded; or unloaded, if it is not to stay.
    """
    service, head = context.service, body.head
    name = named(service, head.model or "")
    async with client_waiting(context.http.receive):
        context.record.keep_alive_seconds = await _keep_alive_seconds(body)
        if context.record.keep_alive_seconds == 0 and await body.run(is_empty):
            return await _unloaded(name, context, shape)

    def line() -> bytes:
        return empty_line(name or service.models.find(name).name, shape)

    keep_alive = None if head.stream is False else KeepAlive(NDJSON, line)
    return await respond(body, context, prepare, keep_alive, name)


async def _keep_alive_seconds(body: ArrivedBody[BodyT]) -> float | None:
    """Raises ApiError (400), as for all fields of the body."""
    with suppress(ValidationError):
        return KEEP_ALIVE.validate_python(body.head.keep_alive)
    await body.check()
    return None


def named(service: Service, name: str) -> str:
    """The name without the tag that Ollama's clients add, where no model has it."""
    return name if service.models.has(name) else name.removesuffix(LATEST)


def _generate_job(
    body: OllamaGenerateRequest, model: ServedModel, record: RequestRecord
) -> Job | bytes:
    requests: Sequence[EngineRequest]
    if not body.prompt and not body.images:
        return without_answer(model.name, generate_shape, "load")
    if body.raw:
        requests, _ = prepare_completion(raw_completion(body, model), model, record)
        plan = None
    else:
        request, plan = prepare_chat(prompt_as_chat(body, model), model, record)
        requests = [request]
    return answer_job(
        model, requests, plan, generate_shape, record.arrived_ns, is_streamed=body.stream
    )


async def _unloaded(name: str, context: RequestContext, shape: Shape) -> Response:
    """Answers at once. An admin unloads the model as soon as its running requests have ended. Any
    other key withdraws its own wishes to keep the model, which other keys' wishes still hold.
    """
    service, record = context.service, context.record
    model = await service.chosen(name, record)
    if service.is_admin(record):
        service.models.pool.begin_unload(model)
    else:
        service.models.pool.withdraw(model, record.key)
    return json_response(without_answer(name, shape, "unload"))


@router.endpoint(
    "POST", "/api/embed", body=OllamaEmbedRequest, answer=OllamaVectors, errors=GENERATION_ERRORS
)
async def embed(context: Context) -> Response:
    """Embeds texts. Without a text it only loads the model."""

    def prepare(body: OllamaEmbedRequest, model: ServedModel, record: RequestRecord) -> Job | bytes:
        if not body.texts:
            return to_json(EmbedForm(model.name, record.arrived_ns).answer([], None))
        asked = as_embedding(body, body.texts, body.dimensions)
        requests = embedding_requests(asked, model, record)
        form = EmbedForm(model.name, record.arrived_ns)
        return vectors_job(model, requests, body.dimensions, form.answer)

    return await _embedded(await context.arrived(OllamaEmbedRequest), prepare, context)


@router.endpoint(
    "POST",
    "/api/embeddings",
    body=OllamaEmbeddingsRequest,
    answer=OllamaVector,
    errors=GENERATION_ERRORS,
)
async def embeddings(context: Context) -> Response:
    """Embeds a prompt. Without a prompt it only loads the model."""

    def prepare(
        body: OllamaEmbeddingsRequest, model: ServedModel, record: RequestRecord
    ) -> Job | bytes:
        if not body.prompt:
            empty: OllamaVector = {"embedding": []}
            return to_json(empty)
        requests = embedding_requests(as_embedding(body, [body.prompt], None), model, record)
        return vectors_job(model, requests, None, one_vector)

    return await _embedded(await context.arrived(OllamaEmbeddingsRequest), prepare, context)


async def _embedded(
    body: ArrivedBody[BodyT], prepare: Prepare[BodyT, Job | bytes], context: RequestContext
) -> Response:
    async with client_waiting(context.http.receive):
        context.record.keep_alive_seconds = await _keep_alive_seconds(body)
    name = named(context.service, body.head.model or "")
    return await respond(body, context, prepare, name=name)


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


@models_router.endpoint("POST", "/api/show", body=OllamaShowRequest, errors=MODEL_ERRORS)
async def show(context: Context) -> OllamaModelInfo:
    """Loads nothing: the answer comes from the model's files."""
    body = await context.read(OllamaShowRequest)
    name = named(context.service, body.named)
    model = await context.service.chosen(name, context.record)
    read = partial(described, name or model.name, model.settings, model.card)
    return await context.service.workers.run(context.record.client, 0, read)


@models_router.endpoint(
    "POST",
    "/api/pull",
    body=OllamaPullRequest,
    answer=OllamaProgress,
    stream=json_lines(OllamaProgress, OllamaError),
)
async def pull(context: Context) -> Response:
    """Downloads like `rootstock pull`. A download continues if the client leaves, and ends when the
    daemon stops. The name is a repository or a served model, which may be a directory.
    """
    body = await context.read(OllamaPullRequest)
    download = await _download(context.service, named(context.service, body.named))
    if body.stream:
        context.record.never_ends()
        lines = written(pull_lines(download))
        return DeferredStream(
            NDJSON, lines, context.service.settings.keepalive_seconds, keep_alive=bytes
        )
    async with client_waiting(context.http.receive):
        await pulled(download)
    return json_response(to_json(SUCCESS))


async def _download(service: Service, name: str) -> Download | None:
    """The download of a model; None for a served model in a directory."""
    models = service.models
    if not models.has(name):
        return models.downloads.start(repository(name))
    source = models.find(name).settings.source
    if await to_thread.run_sync(local_checkpoint, source) is not None:
        return None
    return models.downloads.start(source)


@models_router.endpoint("DELETE", "/api/delete", body=OllamaModelRequest, errors=(404, 409))
async def delete(context: Context) -> Response:
    """Deletes a repository from Hugging Face's cache, every revision of it, unless it is served."""
    body = await context.read(OllamaModelRequest)
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
