"""`POST /v1/embeddings`, `/v1/rerank` and `/v1/score`, and the other paths of the last two."""

from collections.abc import Sequence

from fastapi import Request
from starlette.responses import Response

from server.dialects.embeddings.schema import (
    EmbeddingList,
    RerankRequest,
    RerankResponse,
    ScoreRequest,
    ScoreResponse,
)
from server.dialects.embeddings.write import (
    check_not_empty,
    embedding_job,
    rerank_job,
    score_job,
)
from server.dialects.endpoint import GENERATION_ERRORS, Endpoints
from server.dialects.job import respond, when_loaded
from server.errors import InvalidField
from server.generation.pooling import EmbeddingRequest, embedding_requests
from server.generation.ranking import Pair, prepare_ranking
from server.generation.requests import ServedModel
from server.service import RecordDependency, ServiceDependency

router = Endpoints()


@router.endpoint("POST", "/v1/embeddings", answer=EmbeddingList, errors=GENERATION_ERRORS)
async def create_embeddings(
    body: EmbeddingRequest, http: Request, service: ServiceDependency, record: RecordDependency
) -> Response:
    service.check_priority(body.priority)
    check_not_empty(body)

    async def begin(model: ServedModel) -> Response:
        requests = await embedding_requests(body, model, record)
        return await respond(embedding_job(body, model, requests), http, service)

    return await when_loaded(body.model, begin, http, service)


@router.endpoint(
    "POST", "/v1/rerank", "/v2/rerank", "/rerank", answer=RerankResponse, errors=GENERATION_ERRORS
)
async def rerank(
    body: RerankRequest, http: Request, service: ServiceDependency, record: RecordDependency
) -> Response:
    service.check_priority(body.priority)
    pairs = [
        Pair(body.query, document, "query", f"documents[{index}]")
        for index, document in enumerate(body.documents)
    ]

    async def begin(model: ServedModel) -> Response:
        requests, scores = await prepare_ranking(body, pairs, model, record)
        return await respond(rerank_job(body, model, requests, scores, record.id), http, service)

    return await when_loaded(body.model, begin, http, service)


@router.endpoint("POST", "/v1/score", "/score", answer=ScoreResponse, errors=GENERATION_ERRORS)
async def score(
    body: ScoreRequest, http: Request, service: ServiceDependency, record: RecordDependency
) -> Response:
    service.check_priority(body.priority)

    async def begin(model: ServedModel) -> Response:
        requests, scores = await prepare_ranking(body, _pairs(body), model, record)
        return await respond(score_job(model, requests, scores, record.id), http, service)

    return await when_loaded(body.model, begin, http, service)


def _pairs(body: ScoreRequest) -> Sequence[Pair]:
    """Raises ApiError (400) where it is not said which text belongs to which."""
    first, second = body.text_1, body.text_2
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second):
        raise InvalidField(
            "text_2",
            f"{len(first)} texts in text_1 are compared with as many, not {len(second)}",
        )
    return [
        Pair(one, other, f"text_1[{index}]", f"text_2[{index}]")
        for index, (one, other) in enumerate(zip(first, second, strict=True))
    ]
