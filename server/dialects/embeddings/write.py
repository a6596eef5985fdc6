"""Embeddings, reranked documents and scores of pairs. None of them is ever streamed."""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

from pydantic import BaseModel

from server.dialects.base import wire_json
from server.dialects.embeddings.schema import (
    Embedding,
    EmbeddingList,
    PooledUsage,
    RerankedDocument,
    RerankRequest,
    RerankResponse,
    RerankResult,
    Score,
    ScoreResponse,
)
from server.dialects.openai import PromptTokensDetails
from server.errors import invalid
from server.generation.embedding_task import EmbeddingRequest, EmbeddingTask
from server.generation.events import UsageMeter
from server.generation.pooled import PooledText
from server.generation.ranking_task import RankingTask
from server.generation.vectors import base64, vector


def check_not_empty(body: EmbeddingRequest) -> None:
    """Raise ApiError (400) for an input that is empty, as OpenAI does."""
    for name, one in zip(body.input_names, body.input, strict=True):
        if not one:
            raise invalid(f"{name}: must not be empty", name)


class EmbeddingBuilder:
    """A ResponseBuilder of embeddings, in the order of the inputs."""

    def __init__(self, task: EmbeddingTask) -> None:
        self.engine = task.model.engine
        self.requests = task.requests
        self.meter = task.meter
        self.task = task

    def new_choice(self) -> PooledText:
        return PooledText()

    def whole(self, choices: Sequence[PooledText]) -> bytes:
        answer = EmbeddingList(
            object="list",
            data=[self._embedding(index, one) for index, one in enumerate(choices)],
            model=self.task.model.name,
            usage=pooled_usage(self.meter),
        )
        return wire_json(answer)

    def _embedding(self, index: int, one: PooledText) -> Embedding:
        found = vector(one.pooled, self.task.embedder, self.task.body.dimensions)
        as_text = self.task.body.encoding_format == "base64"
        numbers = base64(found) if as_text else found.tolist()
        return Embedding(object="embedding", index=index, embedding=numbers)


def pooled_usage(meter: UsageMeter) -> PooledUsage:
    total = meter.total
    return PooledUsage(
        prompt_tokens=total.prompt_tokens,
        total_tokens=total.prompt_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=total.cached_tokens),
    )


class RankingBuilder(ABC):
    """A ResponseBuilder of scores."""

    def __init__(self, id: str, task: RankingTask) -> None:
        self.engine = task.model.engine
        self.requests = task.requests
        self.meter = task.meter
        self.id = id
        self.task = task

    def new_choice(self) -> PooledText:
        return PooledText()

    def whole(self, choices: Sequence[PooledText]) -> bytes:
        return wire_json(self.answer(self.task.scores(choices)))

    @abstractmethod
    def answer(self, scores: Sequence[float]) -> BaseModel: ...


class RerankBuilder(RankingBuilder):
    """The documents, the best first; of equal ones the first."""

    def __init__(self, id: str, task: RankingTask, body: RerankRequest) -> None:
        super().__init__(id, task)
        self._body = body

    def answer(self, scores: Sequence[float]) -> RerankResponse:
        order = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)
        return RerankResponse(
            id=f"rerank-{self.id}",
            model=self.task.model.name,
            usage=pooled_usage(self.meter),
            results=[self._result(i, scores[i]) for i in order[: self._body.top_n or None]],
        )

    def _result(self, index: int, score: float) -> RerankResult:
        if not self._body.return_documents:
            return RerankResult(index=index, relevance_score=score)
        document = RerankedDocument(text=self._body.documents[index])
        return RerankResult(index=index, document=document, relevance_score=score)


class ScoreBuilder(RankingBuilder):
    """The pairs, in their order."""

    def answer(self, scores: Sequence[float]) -> ScoreResponse:
        return ScoreResponse(
            id=f"score-{self.id}",
            object="list",
            created=int(time.time()),
            model=self.task.model.name,
            data=[Score(index=i, object="score", score=one) for i, one in enumerate(scores)],
            usage=pooled_usage(self.meter),
        )
