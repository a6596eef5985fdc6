"""`GET /v1/models`."""

from typing import Literal

from pydantic import BaseModel

from engine.types import SamplingDefaults


class Model(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int  # tokens of prompt and answer that context and KV cache hold; vLLM's name
    sampling_defaults: SamplingDefaults


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[Model]
