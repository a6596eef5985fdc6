"""`POST /v1/rerank` and `/v1/score`, in the shapes of vLLM, Jina and Cohere."""

from typing import Annotated, Literal

from pydantic import AliasChoices, BaseModel, BeforeValidator, Field

from server.schemas.base import RequestModel, SparseModel
from server.schemas.embeddings import PooledRequest, PooledUsage

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
Instruction = Annotated[
    str | None,
    Field(
        description="What a document has to be for the query, where the model's template takes it."
    ),
]


class RankingRequest(PooledRequest):
    """Fields that both routes have."""

    instruction: Instruction = None
    max_tokens_per_doc: int | None = Field(
        None, ge=1, description="Cut longer documents at their end."
    )


class RerankRequest(RankingRequest):
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
