"""Embeddings, reranked documents and scores of pairs. None of them is ever streamed."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from operator import methodcaller
from typing import Any

from pydantic_core import to_json

from engine.values.model import Embedder
from engine.values.request import Request
from server.dialects.embeddings.schema import RerankRequest
from server.dialects.job import Job
from server.errors import InvalidField
from server.generation.choice import AnswerUsage, Choice
from server.generation.pooling import EmbeddingRequest, Vector, base64, vector
from server.generation.ranking import Scores
from server.generation.requests import ServedModel


def check_not_empty(body: EmbeddingRequest) -> None:
    """Raise ApiError (400) for an input that is empty, as OpenAI does."""
    for name, one in zip(body.input_names, body.input, strict=True):
        if not one:
            raise InvalidField(name, "must not be empty")


def embedding_job(body: EmbeddingRequest, model: ServedModel, requests: Sequence[Request]) -> Job:
    """The job of embeddings, in the order of the inputs."""
    embedder = model.engine.card.embedder
    assert embedder is not None
    as_text = body.encoding_format == "base64"
    encode: Callable[[Vector], object] = base64 if as_text else methodcaller("tolist")
    render = partial(_embeddings, model.name, embedder, body.dimensions, encode)
    return Job(model=model, requests=requests, render=render)


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


def rerank_job(
    body: RerankRequest, model: ServedModel, requests: Sequence[Request], scores: Scores, id: str
) -> Job:
    """The job of documents, the best first; of equal ones the first."""
    documents = body.documents if body.return_documents else None
    render = partial(_reranked, id, model.name, scores, documents, body.top_n or None)
    return Job(model=model, requests=requests, render=render)


def _reranked(
    id: str,
    model: str,
    scores: Scores,
    documents: Sequence[str] | None,
    top_n: int | None,
    choices: Sequence[Choice],
    usage: AnswerUsage,
) -> bytes:
    """The JSON of a RerankResponse."""
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


def score_job(model: ServedModel, requests: Sequence[Request], scores: Scores, id: str) -> Job:
    """The job of the scores of pairs, in their order."""
    return Job(model=model, requests=requests, render=partial(_scored, id, model.name, scores))


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
