"""What chat and text completions have in common: envelope, usage, chunks and errors."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pydantic import BaseModel

from engine.types.output import FinishReason, OutputEvent
from server.dialects.dialect import wire_json
from server.errors import SERVER, ApiError
from server.generation.events import UsageMeter
from server.schemas.common import (
    CompletionTokensDetails,
    PromptTokensDetails,
    UsageBody,
    WireFinishReason,
)
from server.schemas.errors import ErrorBody, ErrorResponse

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"

WIRE_FINISH_REASONS: dict[FinishReason, WireFinishReason] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
}


@dataclass(frozen=True, slots=True)
class Envelope:
    """What an answer and every chunk of it carry."""

    id: str
    created: int  # seconds since the epoch
    model: str
    system_fingerprint: str


class ChunkWriter(ABC):
    """A StreamWriter of chunks: one JSON object an event, comments as keep-alives, then [DONE]."""

    @abstractmethod
    def events(self, choice: int, events: Sequence[OutputEvent]) -> bytes: ...

    def kept_bytes(self, events: Sequence[OutputEvent]) -> int:
        return 0

    @abstractmethod
    def last_chunks(self) -> Iterable[BaseModel]: ...

    def keep_alive(self) -> bytes:
        return KEEP_ALIVE

    def failure(self, error: ApiError) -> bytes:
        return frame(openai_error(error))

    def end(self) -> bytes:
        return b"".join(map(frame, self.last_chunks())) + DONE


class ChunkTemplate:
    """The chunks of a choice that differ in one place, which in the sample has the JSON `blank`:
    with quotes of its own, so that no text in the sample can be taken for it.
    """

    def __init__(self, sample: BaseModel, blank: bytes) -> None:
        self._head, self._tail = frame(sample).split(blank, 1)

    def frame(self, json: bytes) -> bytes:
        """One event, with this in the place of the blank."""
        return self._head + json + self._tail


def frame(chunk: BaseModel) -> bytes:
    """One event. Keys that were not set are left out; nulls that were set are sent."""
    return b"data: " + wire_json(chunk) + b"\n\n"


def openai_error(error: ApiError) -> ErrorResponse:
    return ErrorResponse(
        error=ErrorBody(message=str(error), type=error.type, param=error.param, code=error.code)
    )


def usage_body(meter: UsageMeter) -> UsageBody:
    usage = meter.total
    return UsageBody(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=usage.cached_tokens),
        completion_tokens_details=CompletionTokensDetails(reasoning_tokens=meter.reasoning_tokens),
    )


def wire_finish_reason(reason: FinishReason | None) -> WireFinishReason:
    """Raises ApiError (500) where the engine never said how a sequence ended."""
    if reason not in WIRE_FINISH_REASONS:
        raise ApiError(500, "The request did not complete.", type=SERVER, code="internal_error")
    return WIRE_FINISH_REASONS[reason]
