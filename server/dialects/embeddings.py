"""`POST /v1/embeddings`, `/v1/rerank` and `/v1/score`, and the other paths of the last two. None of
them is ever streamed. Rerank and score have the shapes of vLLM, Jina and Cohere.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from operator import methodcaller
from sys import getsizeof
from typing import Annotated, ClassVar, Literal, NotRequired

from pydantic import AliasChoices, BeforeValidator, Field
from pydantic_core import to_json
from typing_extensions import TypedDict

from engine.values.model import Embedder
from server.dialects.endpoint import Endpoints
from server.dialects.job import Job
from server.dialects.openai import PromptTokensDetails
from server.errors import InvalidField
from server.generation.choice import AnswerUsage, Choice
from server.generation.pooling import (
    EmbeddingRequest,
    Pair,
    RankingRequest,
    Scores,
    Vector,
    base64,
    embedding_requests,
    prepare_ranking,
    vector,
)
from server.generation.requests import ServedModel
from server.json_model import RequestModel
from server.record import RequestRecord


class Embedding(TypedDict):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class PooledUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class EmbeddingList(TypedDict):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: PooledUsage


MAX_DOCUMENTS = 2048


class TextDocument(RequestModel):
    """A document as an object, whose text counts."""

    text: str


def _text(value: object) -> object:
    return value["text"] if isinstance(value, dict) and "text" in value else value


def _texts(value: object) -> object:
    return [value] if isinstance(value, str) else value


Document = Annotated[str, BeforeValidator(_text, json_schema_input_type=str | TextDocument)]
Documents = Annotated[list[Document], Field(min_length=1, max_length=MAX_DOCUMENTS, fail_fast=True)]
TextList = Annotated[list[str], Field(min_length=1, max_length=MAX_DOCUMENTS, fail_fast=True)]
Texts = Annotated[TextList, BeforeValidator(_texts, json_schema_input_type=str | TextList)]


class RerankRequest(RankingRequest):
    EXAMPLE: ClassVar = {
        "query": "What is a radix tree?",
        "documents": ["A tree that shares beginnings.", "A plant with a trunk."],
    }

    query: str = Field(min_length=1)
    documents: Documents
    top_n: int = Field(
        0,
        ge=0,
        validation_alias=AliasChoices("top_n", "top_k"),
        description="As many of the best; 0: all. Or `top_k`, as Voyage has it.",
    )
    return_documents: bool = True


class RerankedDocument(TypedDict):
    text: str


class RerankResult(TypedDict):
    index: int  # of the request's documents
    document: NotRequired[RerankedDocument]
    relevance_score: float


class RerankResponse(TypedDict):
    id: str
    model: str
    usage: PooledUsage
    results: list[RerankResult]


class ScoreRequest(RankingRequest):
    """One text with each of several, or two lists of equal length, pair by pair."""

    EXAMPLE: ClassVar = {
        "text_1": "What is a radix tree?",
        "text_2": ["A tree that shares beginnings.", "A plant with a trunk."],
    }

    text_1: Texts = Field(
        validation_alias=AliasChoices("text_1", "queries"), description="Or `queries`."
    )
    text_2: Texts = Field(
        validation_alias=AliasChoices("text_2", "documents"), description="Or `documents`."
    )


class Score(TypedDict):
    index: int
    object: Literal["score"]
    score: float


class ScoreResponse(TypedDict):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: PooledUsage


def check_not_empty(body: EmbeddingRequest) -> None:
    """Raise ApiError (400) for an input that is empty, as OpenAI does."""
    for name, one in zip(body.input_names, body.input, strict=True):
        if not one:
            raise InvalidField(name, "must not be empty")


def _embeddings(
    model: str,
    embedder: Embedder,
    dimensions: int | None,
    encode: Callable[[Vector], list[float] | str],
    choices: Sequence[Choice],
    usage: AnswerUsage,
) -> bytes:
    """The JSON of an EmbeddingList."""
    vectors = (vector(choice.pooled, embedder, dimensions) for choice in choices)
    answer: EmbeddingList = {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": encode(each)}
            for index, each in enumerate(vectors)
        ],
        "model": model,
        "usage": _usage(usage),
    }
    return to_json(answer)


def _usage(usage: AnswerUsage) -> PooledUsage:
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
    results = list[RerankResult]()
    for index in order[:top_n]:
        result: RerankResult = {"index": index, "relevance_score": found[index]}
        if documents:
            result["document"] = {"text": documents[index]}
        results.append(result)
    answer: RerankResponse = {
        "id": f"rerank-{id}",
        "model": model,
        "usage": _usage(usage),
        "results": results,
    }
    return to_json(answer)


def _scored(
    id: str, model: str, scores: Scores, choices: Sequence[Choice], usage: AnswerUsage
) -> bytes:
    """The JSON of a ScoreResponse."""
    found = scores([choice.pooled for choice in choices])
    answer: ScoreResponse = {
        "id": f"score-{id}",
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "data": [
            {"index": index, "object": "score", "score": score} for index, score in enumerate(found)
        ],
        "usage": _usage(usage),
    }
    return to_json(answer)


router = Endpoints()


@router.generation(
    "/v1/embeddings", body=EmbeddingRequest, answer=EmbeddingList, check=check_not_empty
)
def create_embeddings(body: EmbeddingRequest, model: ServedModel, record: RequestRecord) -> Job:
    requests = embedding_requests(body, model, record)
    embedder, as_text = model.engine.card.embedder, body.encoding_format == "base64"
    assert embedder is not None
    encode: Callable[[Vector], list[float] | str] = base64 if as_text else methodcaller("tolist")
    render = partial(_embeddings, model.name, embedder, body.dimensions, encode)
    return Job(model=model, requests=requests, render=render)


@router.generation("/v1/rerank", "/v2/rerank", "/rerank", body=RerankRequest, answer=RerankResponse)
def rerank(body: RerankRequest, model: ServedModel, record: RequestRecord) -> Job:
    pairs = [
        Pair(body.query, document, "query", f"documents[{index}]")
        for index, document in enumerate(body.documents)
    ]
    requests, scores = prepare_ranking(body, pairs, model, record)
    documents = body.documents if body.return_documents else None
    render = partial(_reranked, record.id, model.name, scores, documents, body.top_n or None)
    form_bytes = sum(map(getsizeof, documents or ()))
    return Job(model=model, requests=requests, render=render, form_bytes=form_bytes)


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


@router.generation("/v1/score", "/score", body=ScoreRequest, answer=ScoreResponse, check=_pairs)
def score(body: ScoreRequest, model: ServedModel, record: RequestRecord) -> Job:
    requests, scores = prepare_ranking(body, _pairs(body), model, record)
    render = partial(_scored, record.id, model.name, scores)
    return Job(model=model, requests=requests, render=render)
