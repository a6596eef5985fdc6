"""What chat and text completions share: usage, chunks and finish reasons."""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, Field
from pydantic_core import to_json

from engine.values.output import FinishReason, OutputEvent
from server.dialects.base import wire_json
from server.dialects.errors import openai_error
from server.errors import SERVER, ApiError
from server.generation.choice import AnswerUsage, Step
from server.generation.models import ServedModel
from server.http.sse import EVENT_STREAM, KEEP_ALIVE, one_line, sse_data


class CompletionTokensDetails(BaseModel):
    """OpenAI's names. Drafts count whatever they were taken from, a prediction or not."""

    reasoning_tokens: int
    accepted_prediction_tokens: int = Field(
        description="Of the completion's tokens, those that a draft had right."
    )
    rejected_prediction_tokens: int = Field(
        description="Drafted tokens that were wrong. They are in no other count."
    )


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class UsageBody(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


WireFinishReason = Literal["stop", "length"]

DONE = sse_data(b"[DONE]")

WIRE_FINISH_REASONS: dict[FinishReason, WireFinishReason] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
}


def response_fields(prefix: str, id: str, model: ServedModel) -> dict[str, Any]:
    """The fields that a response and all its chunks begin with, but for `object`."""
    return {
        "id": f"{prefix}-{id}",
        "object": "",
        "created": int(time.time()),
        "model": model.name,
        "system_fingerprint": model.fingerprint,
    }


class ChunkWriter(ABC):
    """A StreamWriter of chunks: a JSON object per event, comments as keep-alives, then [DONE].

    All chunks of a stream have the same `fields`. They are rendered once, and each chunk only
    fills in its choice.
    """

    media_type = EVENT_STREAM

    def __init__(self, fields: dict[str, Any], *, with_usage: bool) -> None:
        self._fields = {**fields, "choices": []}
        self._with_usage = with_usage
        self._head, self._tail = sse_data(to_json(self._fields)).split(_NO_CHOICES)

    @abstractmethod
    def write(self, choice: int, steps: Sequence[Step]) -> bytes: ...

    def chunk(self, choice: bytes) -> bytes:
        """The event of a chunk with this choice, as JSON."""
        return b'%b"choices":[%b]%b' % (self._head, one_line(choice), self._tail)

    def kept_bytes(self, events: Sequence[OutputEvent]) -> int:
        return 0

    def keep_alive(self) -> bytes:
        return KEEP_ALIVE

    def failure(self, error: ApiError) -> bytes:
        return sse_data(wire_json(openai_error(error)))

    def end(self, usage: AnswerUsage) -> bytes:
        if not self._with_usage:
            return DONE
        return sse_data(to_json({**self._fields, "usage": usage_fields(usage)})) + DONE


_NO_CHOICES = b'"choices":[]'
"""It contains quotes, so no text in JSON can equal it."""


def usage_fields(usage: AnswerUsage) -> dict[str, Any]:
    """The JSON of a UsageBody."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            "accepted_prediction_tokens": usage.accepted_draft_tokens,
            "rejected_prediction_tokens": usage.rejected_draft_tokens,
        },
    }


def wire_finish_reason(reason: FinishReason | None) -> WireFinishReason:
    """Raises ApiError (500) for a sequence that has not finished."""
    if reason not in WIRE_FINISH_REASONS:
        raise ApiError(500, "The request did not complete.", type=SERVER, code="internal_error")
    return WIRE_FINISH_REASONS[reason]
