"""`POST /v1/embeddings`, `/v1/rerank` and `/v1/score`, and the other paths of the last two. None of
them is ever streamed.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from operator import methodcaller
from typing import Any

from fastapi import Request as HttpRequest
from pydantic_core import to_json
from starlette.responses import Response

from engine.values.model import Embedder
from server.dialects.embeddings.schema import (
    EmbeddingList,
    RerankRequest,
    RerankResponse,
    ScoreRequest,
    ScoreResponse,
)
from server.dialects.endpoint import GENERATION_ERRORS, Endpoints
from server.dialects.job import Job, respond, when_loaded
from server.errors import InvalidField
from server.generation.choice import AnswerUsage, Choice
from server.generation.pooling import (
    EmbeddingRequest,
    Pair,
    Scores,
    Vector,
    base64,
    embedding_requests,
    prepare_ranking,
    vector,
)
from server.generation.requests import ServedModel
from server.service import RecordDependency, ServiceDependency


def check_not_empty(body: EmbeddingRequest) -> None:
    """Raise ApiError (400) for an input that is empty, as OpenAI does."""
    for name, one in zip(body.input_names, body.input, strict=True):
        if not one:
            raise InvalidField(name, "must not be empty")


def _embeddings(
    model: str,
    embedder: Embedder,
    dimensions: int | None,
    encode: Callable[[Vector], object],
    choices: Sequence[Choice],
    usage: AnswerUsage,
) -> bytes:
    """The JSON of an EmbeddingList."""
    vectors = (vector(choice.pooled, embedder, dimensions) for choice in choices)
    data = [
        {"object": "embedding", "index": index, "embedding": encode(each)}
        for index, each in enumerate(vectors)
    ]
    return to_json({"object": "list", "data": data, "model": model, "usage": _usage(usage)})


def _usage(usage: AnswerUsage) -> dict[str, Any]:
    """The JSON of a PooledUsage."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "total_tokens": usage.prompt_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _reranked(
    id: str,
    model: str,
    scores: Scores,
    documents: Sequence[str] | None,
    top_n: int | None,
    choices: Sequence[Choice],
    usage: AnswerUsage,
) -> bytes:
    """The JSON of a RerankResponse: the best document first; of equal ones the first."""
    found = scores([choice.pooled for choice in choices])
    order = sorted(range(len(found)), key=found.__getitem__, reverse=True)
    results = [
        {
            "index": index,
            **({"document": {"text": documents[index]}} if documents else {}),
            "relevance_score": found[index],
        }
        for index in order[:top_n]
    ]
    return to_json(
        {"id": f"rerank-{id}", "model": model, "usage": _usage(usage), "results": results}
    )


def _scored(
    id: str, model: str, scores: Scores, choices: Sequence[Choice], usage: AnswerUsage
) -> bytes:
    """The JSON of a ScoreResponse."""
    found = scores([choice.pooled for choice in choices])
    return to_json(
        {
            "id": f"score-{id}",
            "object": "list",
            "created": int(time.time()),
            "model": model,
            "data": [
                {"index": index, "object": "score", "score": score}
                for index, score in enumerate(found)
            ],
            "usage": _usage(usage),
        }
    )


router = Endpoints()


@router.endpoint("POST", "/v1/embeddings", answer=EmbeddingList, errors=GENERATION_ERRORS)
async def create_embeddings(
    body: EmbeddingRequest, http: HttpRequest, service: ServiceDependency, record: RecordDependency
) -> Response:
    service.check_priority(body.priority)
    check_not_empty(body)

    async def begin(model: ServedModel) -> Response:
        requests = await embedding_requests(body, model, record)
        embedder, as_text = model.engine.card.embedder, body.encoding_format == "base64"
        assert embedder is not None
        encode: Callable[[Vector], object] = base64 if as_text else methodcaller("tolist")
        render = partial(_embeddings, model.name, embedder, body.dimensions, encode)
        return await respond(Job(model=model, requests=requests, render=render), http, service)

    return await when_loaded(body.model, begin, http, service)


@router.endpoint(
    "POST", "/v1/rerank", "/v2/rerank", "/rerank", answer=RerankResponse, errors=GENERATION_ERRORS
)
async def rerank(
    body: RerankRequest, http: HttpRequest, service: ServiceDependency, record: RecordDependency
) -> Response:
    service.check_priority(body.priority)
    pairs = [
        Pair(body.query, document, "query", f"documents[{index}]")
        for index, document in enumerate(body.documents)
    ]

    async def begin(model: ServedModel) -> Response:
        requests, scores = await prepare_ranking(body, pairs, model, record)
        documents = body.documents if body.return_documents else None
        render = partial(_reranked, record.id, model.name, scores, documents, body.top_n or None)
        return await respond(Job(model=model, requests=requests, render=render), http, service)

    return await when_loaded(body.model, begin, http, service)


@router.endpoint("POST", "/v1/score", "/score", answer=ScoreResponse, errors=GENERATION_ERRORS)
async def score(
    body: ScoreRequest, http: HttpRequest, service: ServiceDependency, record: RecordDependency
) -> Response:
    service.check_priority(body.priority)

    async def begin(model: ServedModel) -> Response:
        requests, scores = await prepare_ranking(body, _pairs(body), model, record)
        render = partial(_scored, record.id, model.name, scores)
        return await respond(Job(model=model, requests=requests, render=render), http, service)

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
