"""Engine output to chat completions and their chunks. No I/O."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from engine.types import FinishReason, OutputEvent, TokenLogprob, Usage
from server.errors import SERVER, ApiError
from server.generation import Generated, UsageMeter
from server.schemas.chat import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChoiceLogprobs,
    ChunkChoice,
    Delta,
)
from server.schemas.common import PromptTokensDetails, UsageBody, WireFinishReason

LogprobRenderer = Callable[[Sequence[TokenLogprob]], ChoiceLogprobs | None]

WIRE_FINISH_REASONS: dict[FinishReason, WireFinishReason] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
}


@dataclass(frozen=True, slots=True)
class Envelope:
    """What an answer and every chunk of it carry."""

    id: str
    created: int
    model: str
    system_fingerprint: str


def usage_body(usage: Usage) -> UsageBody:
    return UsageBody(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=usage.cached_tokens),
    )


def wire_finish_reason(reason: FinishReason | None) -> WireFinishReason:
    """Raises ApiError (500) where the engine never said how a sequence ended."""
    if reason not in WIRE_FINISH_REASONS:
        raise ApiError(500, "The request did not complete.", type=SERVER, code="internal_error")
    return WIRE_FINISH_REASONS[reason]


def no_logprobs(entries: Sequence[TokenLogprob]) -> None:
    """The LogprobRenderer of requests that asked for none."""


def chat_completion(
    envelope: Envelope, choices: Sequence[Generated], usage: Usage, logprobs: LogprobRenderer
) -> ChatCompletion:
    return ChatCompletion(
        id=envelope.id,
        object="chat.completion",
        created=envelope.created,
        model=envelope.model,
        system_fingerprint=envelope.system_fingerprint,
        choices=[
            ChatChoice(
                index=index,
                message=AssistantMessage(role="assistant", content=choice.text, refusal=None),
                logprobs=logprobs(choice.logprobs),
                finish_reason=wire_finish_reason(choice.finish_reason),
            )
            for index, choice in enumerate(choices)
        ],
        usage=usage_body(usage),
    )


class ChatChunks:
    """The chunks of one streamed chat completion. Without a `usage` meter none carries usage."""

    def __init__(
        self, envelope: Envelope, logprobs: LogprobRenderer, usage: UsageMeter | None
    ) -> None:
        self._envelope = envelope
        self._logprobs = logprobs
        self._usage = usage
        self._introduced: set[int] = set()

    def chunks(self, choice: int, event: OutputEvent) -> Iterable[ChatChunk]:
        if event.admission is not None:
            return  # until there is a token, an error has a status of its own
        if choice not in self._introduced:
            self._introduced.add(choice)
            yield self._chunk(choice, Delta(role="assistant", content="", refusal=None))
        if event.text or event.logprobs:
            logprobs = self._logprobs(event.logprobs)
            if event.text or logprobs is not None:
                yield self._chunk(choice, Delta(content=event.text), logprobs)
        if event.finish_reason is not None:
            reason = wire_finish_reason(event.finish_reason)
            yield self._chunk(choice, Delta(), finish_reason=reason)

    def last_chunks(self) -> Iterable[ChatChunk]:
        if self._usage is not None:
            yield self._with_choices([], usage=usage_body(self._usage.total))

    def _chunk(
        self,
        choice: int,
        delta: Delta,
        logprobs: ChoiceLogprobs | None = None,
        finish_reason: WireFinishReason | None = None,
    ) -> ChatChunk:
        body = ChunkChoice(
            index=choice, delta=delta, logprobs=logprobs, finish_reason=finish_reason
        )
        usage = {} if self._usage is None else {"usage": None}
        return self._with_choices([body], **usage)

    def _with_choices(self, choices: list[ChunkChoice], **usage: Any) -> ChatChunk:
        return ChatChunk(
            id=self._envelope.id,
            object="chat.completion.chunk",
            created=self._envelope.created,
            model=self._envelope.model,
            system_fingerprint=self._envelope.system_fingerprint,
            choices=choices,
            **usage,
        )
