"""`POST /v1/completions`: the completion and its chunks. The request is generation's."""

from typing import Literal

from pydantic import BaseModel

from server.dialects.openai import UsageBody, WireFinishReason
from server.json_model import SparseModel


class CompletionLogprobs(BaseModel):
    """Parallel lists, one entry for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: WireFinishReason


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: UsageBody


class CompletionChunkChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: WireFinishReason | None  # null before the last: clients expect the key


class CompletionChunk(SparseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChunkChoice]
    usage: UsageBody | None = None  # set in the last chunk, with include_usage
