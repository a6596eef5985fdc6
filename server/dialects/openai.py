"""What chat and text completions share: usage, chunks and finish reasons."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, Field

from engine.values.output import FinishReason, OutputEvent
from server.dialects.base import wire_json
from server.dialects.errors import openai_error
from server.errors import SERVER, ApiError
from server.generation.events import UsageMeter
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


@dataclass(frozen=True, slots=True)
class ResponseFields:
    """The fields that a response and all its chunks repeat."""

    id: str
    created: int  # seconds since the epoch
    model: str
    system_fingerprint: str


class ChunkWriter(ABC):
    """A StreamWriter of chunks: a JSON object per event, comments as keep-alives, then [DONE]."""

    media_type = EVENT_STREAM

    @abstractmethod
    def events(self, choice: int, events: Sequence[OutputEvent]) -> bytes: ...

    def kept_bytes(self, events: Sequence[OutputEvent]) -> int:
        return 0

    @abstractmethod
    def last_chunks(self) -> Iterable[BaseModel]: ...

    def keep_alive(self) -> bytes:
        return KEEP_ALIVE

    def failure(self, error: ApiError) -> bytes:
        return chunk_event(openai_error(error))

    def end(self) -> bytes:
        return b"".join(map(chunk_event, self.last_chunks())) + DONE


class ChunkTemplate:
    """A chunk of a choice rendered once: only the JSON `blank` of the sample is replaced.

    The blank contains quotes, so no text of the sample can equal it.
    """

    def __init__(self, sample: BaseModel, blank: bytes) -> None:
        self._head, self._tail = chunk_event(sample).split(blank, 1)

    def event(self, json: bytes) -> bytes:
        """The chunk's event with this JSON in place of the blank."""
        return self._head + one_line(json) + self._tail


def chunk_event(chunk: BaseModel) -> bytes:
    """The chunk as a server-sent event."""
    return sse_data(wire_json(chunk))


def usage_body(meter: UsageMeter) -> UsageBody:
    usage = meter.total
    return UsageBody(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=usage.cached_tokens),
        completion_tokens_details=CompletionTokensDetails(
            reasoning_tokens=meter.reasoning_tokens,
            accepted_prediction_tokens=usage.accepted_draft_tokens,
            rejected_prediction_tokens=usage.rejected_draft_tokens,
        ),
    )


def wire_finish_reason(reason: FinishReason | None) -> WireFinishReason:
    """Raises ApiError (500) for a sequence that has not finished."""
    if reason not in WIRE_FINISH_REASONS:
        raise ApiError(500, "The request did not complete.", type=SERVER, code="internal_error")
    return WIRE_FINISH_REASONS[reason]
