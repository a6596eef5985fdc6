"""What Ollama's clients are told of models."""

from datetime import datetime
from typing import Any

from pydantic import BaseModel

from server.schemas.base import SparseModel


class OllamaVersion(BaseModel):
    """Of the API, not of the daemon: clients ask whether it is late enough."""

    version: str


class OllamaDetails(BaseModel):
    """Empty where a checkpoint does not say."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(BaseModel):
    """A model that is served. `size` is that of its files, in bytes."""

    name: str
    model: str
    modified_at: datetime
    size: int
    digest: str
    details: OllamaDetails


class OllamaModels(BaseModel):
    models: list[OllamaModel]


class OllamaRunningModel(BaseModel):
    """A model that is loaded. Sizes are bytes of memory, of all and of the GPU's."""

    name: str
    model: str
    size: int
    digest: str
    details: OllamaDetails
    expires_at: datetime
    size_vram: int
    context_length: int


class OllamaRunningModels(BaseModel):
    models: list[OllamaRunningModel]


class OllamaModelInfo(BaseModel):
    """A model in detail. `parameters` are those that hold where a request is silent."""

    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: datetime


class OllamaProgress(SparseModel):
    """A line of how fetching goes. `total` and `completed` are bytes."""

    status: str
    digest: str | None = None
    total: int | None = None
    completed: int | None = None
