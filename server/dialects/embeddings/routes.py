"""`POST /v1/embeddings`, `/v1/rerank` and `/v1/score`, and the other paths of the last two."""

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from server.dialects.delivery import respond_whole
from server.dialects.embeddings.schema import (
    EmbeddingList,
    RerankRequest,
    RerankResponse,
    ScoreRequest,
    ScoreResponse,
)
from server.dialects.embeddings.write import (
    EmbeddingBuilder,
    RerankBuilder,
    ScoreBuilder,
    check_not_empty,
)
from server.dialects.endpoint import errors, json_body
from server.dialects.loading import when_loaded
from server.errors import invalid
from server.generation.embedding_task import EmbeddingRequest, embedding_task
from server.generation.models import ServedModel
from server.generation.ranking_task import Pair, ranking_task
from server.service import JsonBody, RecordDependency, ServiceDependency

router = APIRouter()

EmbeddingBody = Annotated[EmbeddingRequest, Depends(JsonBody(EmbeddingRequest))]


@router.post(
    "/v1/embeddings",
    response_model=EmbeddingList,
    responses=errors(400, 403, 404, 408, 410, 413, 429, 503),
    openapi_extra=json_body(EmbeddingRequest),
)
async def create_embeddings(
    body: EmbeddingBody, http: Request, service: ServiceDependency, record: RecordDependency
) -> Response:
    service.check_priority(body.priority)
    check_not_empty(body)

    async def begin(model: ServedModel) -> Response:
        task = await embedding_task(body, model, record)
        return await respond_whole(EmbeddingBuilder(task), http, service)

    return await when_loaded(body.model, begin, http, service)


RerankBody = Annotated[RerankRequest, Depends(JsonBody(RerankRequest))]
ScoreBody = Annotated[ScoreRequest, Depends(JsonBody(ScoreRequest))]

_ERRORS = errors(400, 403, 404, 408, 410, 413, 429, 503)
_RERANK: dict[str, Any] = {
    "response_model": RerankResponse,
    "responses": _ERRORS,
    "openapi_extra": json_body(RerankRequest),
}
_SCORE: dict[str, Any] = {
    "response_model": ScoreResponse,
    "responses": _ERRORS,
    "openapi_extra": json_body(ScoreRequest),
}


@router.post("/rerank", **_RERANK)
@router.post("/v2/rerank", **_RERANK)
@router.post("/v1/rerank", **_RERANK)
async def rerank(
    body: RerankBody, http: Request, service: ServiceDependency, record: RecordDependency
) -> Response:
    service.check_priority(body.priority)
    pairs = [
        Pair(body.query, document, "query", f"documents[{index}]")
        for index, document in enumerate(body.documents)
    ]

    async def begin(model: ServedModel) -> Response:
        task = await ranking_task(body, pairs, model, record)
        return await respond_whole(RerankBuilder(record.id, task, body), http, service)

    return await when_loaded(body.model, begin, http, service)


@router.post("/score", **_SCORE)
@router.post("/v1/score", **_SCORE)
async def score(
    body: ScoreBody, http: Request, service: ServiceDependency, record: RecordDependency
) -> Response:
    service.check_priority(body.priority)

    async def begin(model: ServedModel) -> Response:
        task = await ranking_task(body, _pairs(body), model, record)
        return await respond_whole(ScoreBuilder(record.id, task), http, service)

    return await when_loaded(body.model, begin, http, service)


def _pairs(body: ScoreRequest) -> Sequence[Pair]:
    """Raises ApiError (400) where it is not said which text belongs to which."""
    first, second = body.text_1, body.text_2
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second):
        raise invalid(
            f"text_2: {len(first)} texts in text_1 are compared with as many, not {len(second)}",
            "text_2",
        )
    return [
        Pair(one, other, f"text_1[{index}]", f"text_2[{index}]")
        for index, (one, other) in enumerate(zip(first, second, strict=True))
    ]
