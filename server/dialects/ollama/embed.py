"""Ollama's embeddings, which are never streamed."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from pydantic import BaseModel

from server.dialects.dialect import wire_json
from server.dialects.ollama.answer import Stopwatch
from server.generation.embedding_task import EmbeddingTask
from server.generation.pooled import PooledText
from server.generation.vectors import vector
from server.schemas.embeddings import WHOLE_CONTEXT, EmbeddingRequest
from server.schemas.ollama.embed import OllamaEmbedding, OllamaVector, OllamaVectors


def as_embedding(
    body: OllamaEmbedding, texts: Sequence[str], dimensions: int | None
) -> EmbeddingRequest:
    """The request for embeddings that the body means."""
    return EmbeddingRequest(
        model=body.model,
        input=list(texts),
        dimensions=dimensions,
        truncate_prompt_tokens=WHOLE_CONTEXT if body.truncate else None,
        cache_salt=body.cache_salt,
    )


class OllamaEmbeddingBuilder(ABC):
    """A ResponseBuilder of embeddings, in the order of the texts."""

    def __init__(self, task: EmbeddingTask, watch: Stopwatch) -> None:
        watch.asked()
        self.engine = task.model.engine
        self.requests = task.requests
        self.meter = task.meter
        self.task = task
        self.watch = watch

    def new_choice(self) -> PooledText:
        return PooledText()

    def whole(self, choices: Sequence[PooledText]) -> bytes:
        task = self.task
        found = (vector(one.pooled, task.embedder, task.body.dimensions) for one in choices)
        return wire_json(self.answer([each.tolist() for each in found]))

    @abstractmethod
    def answer(self, vectors: list[list[float]]) -> BaseModel: ...


class EmbedBuilder(OllamaEmbeddingBuilder):
    """The answer of `/api/embed`."""

    def answer(self, vectors: list[list[float]]) -> OllamaVectors:
        durations = self.watch.durations()
        return OllamaVectors(
            model=self.task.model.name,
            embeddings=vectors,
            total_duration=durations["total_duration"],
            load_duration=durations["load_duration"],
            prompt_eval_count=self.meter.total.prompt_tokens,
        )


class EmbeddingsBuilder(OllamaEmbeddingBuilder):
    """The answer of `/api/embeddings`, of one text."""

    def answer(self, vectors: list[list[float]]) -> OllamaVector:
        (embedding,) = vectors
        return OllamaVector(embedding=embedding)
