"""`POST /v1/embeddings`; `/v1/rerank` and `/v1/score` in the shapes of vLLM, Jina and Cohere."""

from typing import Annotated, ClassVar, Literal

from pydantic import AliasChoices, BaseModel, BeforeValidator, Field

from server.dialects.openai import PromptTokensDetails
from server.generation.pooling import RankingRequest
from server.json_model import RequestModel, SparseModel


class Embedding(BaseModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class PooledUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class EmbeddingList(BaseModel):
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
    top_n: int = Field(0, ge=0, description="As many of the best; 0: all.")
    return_documents: bool = True


class RerankedDocument(BaseModel):
    text: str


class RerankResult(SparseModel):
    index: int  # of the request's documents
    document: RerankedDocument | None = None
    relevance_score: float


class RerankResponse(BaseModel):
    id: str
    model: str
    usage: PooledUsage
    results: list[RerankResult]


class ScoreRequest(RankingRequest):
    """One text against each of several, or as many against as many, pair by pair."""

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


class Score(BaseModel):
    index: int
    object: Literal["score"]
    score: float


class ScoreResponse(BaseModel):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: PooledUsage
