"""`GET /v1/models`: OpenAI's keys, and beside them Anthropic's."""

from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel

from engine.values.model import SamplingDefaults, Task
from server.schemas.pool import State


class Model(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str  # the first of its names; this and the next are vLLM's
    parent: str | None  # of an adapter the model that it changes
    state: State  # whether it is in memory
    # Tokens of prompt and answer that context and KV cache hold, by vLLM's name
    max_model_len: int | None
    sampling_defaults: SamplingDefaults | None
    tasks: list[Task] | None

    type: Literal["model"]
    display_name: str
    created_at: datetime
    lifecycle: Literal["active"]
    max_input_tokens: int | None
    max_tokens: int | None


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[Model]
    has_more: Literal[False]
    first_id: str | None
    last_id: str | None
    models: list[Any] | None = None  # set for Codex alone, which reads no list without it
