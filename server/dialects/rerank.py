"""Reranked documents, as vLLM, Jina and Cohere answer, and vLLM's scores of pairs."""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

from pydantic import BaseModel

from server.dialects.dialect import wire_json
from server.dialects.embeddings import pooled_usage
from server.generation.pooled import PooledText
from server.generation.ranking_task import RankingTask
from server.schemas.rerank import (
    RerankedDocument,
    RerankRequest,
    RerankResponse,
    RerankResult,
    Score,
    ScoreResponse,
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
