"""Ollama's embeddings: `/api/embed`, and `/api/embeddings`, its older form with one text."""

from typing import Annotated

from pydantic import BaseModel, Field

from server.schemas.base import RequestModel
from server.schemas.embeddings import MAX_INPUTS
from server.schemas.ollama.keep_alive import KeepAlive
from server.schemas.ollama.request import ModelName, OllamaOptions


class OllamaEmbedding(RequestModel):
    """What both have in common."""

    model: ModelName = ""
    truncate: bool = Field(True, description="Cut a text at what the model takes, or refuse it.")
    options: OllamaOptions = Field(default_factory=OllamaOptions)
    keep_alive: KeepAlive | None = None
    cache_salt: str = Field("", max_length=256)


class OllamaEmbedRequest(OllamaEmbedding):
    input: str | Annotated[list[str], Field(max_length=MAX_INPUTS)] = ""
    dimensions: int | None = Field(None, ge=1)

    @property
    def texts(self) -> list[str]:
        if isinstance(self.input, list):
            return self.input
        return [self.input] if self.input else []


class OllamaEmbeddingsRequest(OllamaEmbedding):
    prompt: str = ""


class OllamaVectors(BaseModel):
    """Durations are nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaVector(BaseModel):
    embedding: list[float]
