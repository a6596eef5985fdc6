"""`POST /api/embed` and `/api/embeddings`, as Ollama has them."""

from typing import Annotated

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from server.dialects.dialect import wire_json
from server.dialects.ollama.answer import Stopwatch
from server.dialects.ollama.embed import EmbedBuilder, EmbeddingsBuilder, as_embedding
from server.generation.embedding_task import embedding_task
from server.generation.models import ServedModel
from server.openapi import errors, json_body
from server.routes.delivery import json_response, respond_whole
from server.routes.loading import when_loaded
from server.routes.ollama import STATUSES, named
from server.schemas.ollama.embed import (
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaVector,
    OllamaVectors,
)
from server.service import JsonBody, RecordDependency, ServiceDependency

router = APIRouter()

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
