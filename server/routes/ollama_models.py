"""`/api/version`, `tags`, `show`, `ps`, `pull` and `delete`, as Ollama has them."""

from functools import partial
from typing import Annotated

from anyio import to_thread
from fastapi import APIRouter, Depends
from starlette.responses import Response, StreamingResponse

from engine.launch import local_checkpoint
from server.dialects.dialect import wire_json
from server.dialects.ollama.models import (
    described,
    listed,
    repository,
    running,
)
from server.dialects.ollama.pull import SUCCESS, pull_lines, pulled
from server.downloads import Download
from server.errors import ApiError
from server.model_cache import NotCached, deletions
from server.openapi import errors, json_body, stream_of_lines
from server.routes.delivery import json_response
from server.routes.ollama import named
from server.schemas.ollama.answer import OllamaError
from server.schemas.ollama.models import (
    OllamaModelInfo,
    OllamaModels,
    OllamaProgress,
    OllamaRunningModels,
    OllamaVersion,
)
from server.schemas.ollama.request import (
    OllamaModelRequest,
    OllamaPullRequest,
    OllamaShowRequest,
)
from server.service import JsonBody, RecordDependency, Service, ServiceDependency
from server.transport.sse import NDJSON

API_VERSION = "0.12.11"
"""Of Ollama: the first whose chats have log-probabilities, which are the latest of what is here."""

router = APIRouter()

ShowBody = Annotated[OllamaShowRequest, Depends(JsonBody(OllamaShowRequest))]
ModelBody = Annotated[OllamaModelRequest, Depends(JsonBody(OllamaModelRequest))]
PullBody = Annotated[OllamaPullRequest, Depends(JsonBody(OllamaPullRequest))]


@router.head("/api/version", include_in_schema=False)
@router.get("/api/version")
async def version() -> OllamaVersion:
    return OllamaVersion(version=API_VERSION)


@router.head("/api/tags", include_in_schema=False)
@router.get("/api/tags", responses=errors(503))
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


@router.head("/api/ps", include_in_schema=False)
@router.get("/api/ps", responses=errors(503))
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


@router.post(
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


@router.post(
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


@router.delete(
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
