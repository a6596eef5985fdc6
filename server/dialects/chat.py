"""Engine output to chat completions and their chunks. No I/O."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from engine.types import FinishReason, OutputEvent, TokenLogprob
from server.errors import SERVER, ApiError
from server.generation.answer import ChatAnswer, WholeAnswer
from server.generation.events import UsageMeter
from server.parsing.parts import CallArguments, CallBegun, Content, Part, Reasoning
from server.schemas.chat import (
    AssistantMessage,
    CalledFunction,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChoiceLogprobs,
    ChunkChoice,
    Delta,
    FunctionDelta,
    ToolCallBody,
    ToolCallDelta,
)
from server.schemas.common import (
    CompletionTokensDetails,
    PromptTokensDetails,
    UsageBody,
    WireFinishReason,
)

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


def no_logprobs(entries: Sequence[TokenLogprob]) -> None:
    """The LogprobRenderer of requests that asked for none."""


def chat_completion(
    envelope: Envelope, choices: Sequence[WholeAnswer], meter: UsageMeter, logprobs: LogprobRenderer
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
                message=_message(choice.answer),
                logprobs=logprobs(choice.logprobs),
                finish_reason=_finish_reason(choice.answer),
            )
            for index, choice in enumerate(choices)
        ],
        usage=usage_body(meter),
    )


def _message(answer: ChatAnswer) -> AssistantMessage:
    """Without calls the content is text, be it empty; keys of what there is not are left out."""
    extras: dict[str, Any] = {}
    if answer.calls:
        extras["tool_calls"] = [
            ToolCallBody(
                id=call.id,
                type="function",
                function=CalledFunction(name=call.name, arguments=call.arguments),
            )
            for call in answer.calls
        ]
    if answer.reasoning:
        extras |= {"reasoning_content": answer.reasoning, "reasoning": answer.reasoning}
    content = None if answer.calls and not answer.content else answer.content
    return AssistantMessage(role="assistant", content=content, refusal=None, **extras)


def _finish_reason(answer: ChatAnswer) -> WireFinishReason:
    wire = wire_finish_reason(answer.finish_reason)
    return "tool_calls" if wire == "stop" and answer.calls else wire


class ChatChunks:
    """The chunks of one streamed chat completion. Without `with_usage` none carries usage."""

    def __init__(
        self,
        envelope: Envelope,
        logprobs: LogprobRenderer,
        new_answer: Callable[[], ChatAnswer],
        meter: UsageMeter,
        with_usage: bool,
    ) -> None:
        self._envelope = envelope
        self._logprobs = logprobs
        self._new_answer = new_answer
        self._meter = meter
        self._with_usage = with_usage
        self._answers: dict[int, ChatAnswer] = {}

    def chunks(self, choice: int, event: OutputEvent) -> Iterable[ChatChunk]:
        if event.admission is not None:
            return  # until there is a token, an error has a status of its own
        if choice not in self._answers:
            self._answers[choice] = self._new_answer()
            yield self._chunk(choice, Delta(role="assistant", content="", refusal=None))
        answer = self._answers[choice]
        deltas = [delta_of(part) for part in answer.add(event)]
        logprobs = self._logprobs(event.logprobs) if event.logprobs else None
        if logprobs is not None and not deltas:
            deltas = [Delta(content="")]
        for delta in deltas:
            yield self._chunk(choice, delta, logprobs)
            logprobs = None
        if event.finish_reason is not None:
            yield self._chunk(choice, Delta(), finish_reason=_finish_reason(answer))

    def last_chunks(self) -> Iterable[ChatChunk]:
        if self._with_usage:
            yield self._with_choices([], usage=usage_body(self._meter))

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
        usage = {"usage": None} if self._with_usage else {}
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


def delta_of(part: Part) -> Delta:
    """One part of an answer as news of a message."""
    match part:
        case Content(text):
            return Delta(content=text)
        case Reasoning(text):
            return Delta(reasoning_content=text, reasoning=text)
        case CallBegun(index, id, name):
            function = FunctionDelta(name=name, arguments="")
            return Delta(
                tool_calls=[ToolCallDelta(index=index, id=id, type="function", function=function)]
            )
        case CallArguments(index, text):
            function = FunctionDelta(arguments=text)
            return Delta(tool_calls=[ToolCallDelta(index=index, function=function)])
