"""OpenAI's chat completions, whole and streamed."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from engine.types.output import OutputEvent, TokenLogprob
from server.dialects.dialect import generated, wire_json
from server.dialects.logprobs import chat_logprobs
from server.dialects.openai import (
    ChunkTemplate,
    ChunkWriter,
    ResponseFields,
    chunk_event,
    usage_body,
    wire_finish_reason,
)
from server.generation.answer import ChatAnswer, WholeAnswer
from server.generation.chat_task import ChatTask
from server.parsing.parts import AnswerPart, CallArguments, CallBegun, Content, Reasoning
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
from server.schemas.common import WireFinishReason

LogprobRenderer = Callable[[Sequence[TokenLogprob]], ChoiceLogprobs | None]


def no_logprobs(entries: Sequence[TokenLogprob]) -> None:
    """The LogprobRenderer of requests that asked for none."""


class ChatBuilder:
    """A ResponseBuilder of chat completions."""

    def __init__(self, task: ChatTask) -> None:
        self.engine = task.model.engine
        self.requests = [task.request]
        self.meter = task.meter
        self.is_streamed = task.body.stream
        self.new_answer = task.new_answer
        self.with_usage = task.body.include_usage
        self.fields = ResponseFields(
            id=f"chatcmpl-{task.request.id}",
            created=int(time.time()),
            model=task.model.name,
            system_fingerprint=self.engine.card.fingerprint,
        )
        self.logprobs: LogprobRenderer = no_logprobs
        if task.body.logprobs:
            self.logprobs = partial(chat_logprobs, self.engine.tokenizer)

    def writer(self) -> "ChatWriter":
        return ChatWriter(self)

    def new_choice(self) -> WholeAnswer:
        return WholeAnswer(self.new_answer())

    def whole(self, choices: Sequence[WholeAnswer]) -> bytes:
        completion = ChatCompletion(
            id=self.fields.id,
            object="chat.completion",
            created=self.fields.created,
            model=self.fields.model,
            system_fingerprint=self.fields.system_fingerprint,
            choices=[
                ChatChoice(
                    index=index,
                    message=_message(choice.answer),
                    logprobs=self.logprobs(choice.logprobs),
                    finish_reason=_finish_reason(choice.answer),
                )
                for index, choice in enumerate(choices)
            ],
            usage=usage_body(self.meter),
        )
        return wire_json(completion)


def _message(answer: ChatAnswer) -> AssistantMessage:
    """The content is null beside tool calls that have no text, else text, which may be empty."""
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


class ChatWriter(ChunkWriter):
    """The chunks of one streamed chat completion."""

    def __init__(self, builder: ChatBuilder) -> None:
        self._builder = builder
        self._answers: dict[int, ChatAnswer] = {}
        self._templates: dict[int, ChunkTemplate] = {}

    def events(self, choice: int, events: Sequence[OutputEvent]) -> bytes:
        output = generated(events)
        if not output:
            return b""  # until there is a token, an error has a status of its own
        return b"".join(self._output(choice, output))

    def _output(self, choice: int, events: Sequence[OutputEvent]) -> Iterator[bytes]:
        if choice not in self._answers:
            yield self._begin(choice)
        answer = self._answers[choice]
        deltas = [delta_of(part) for part in answer.add_all(events)]
        entries = [entry for event in events for entry in event.logprobs]
        logprobs = self._builder.logprobs(entries) if entries else None
        if logprobs is not None:
            first = deltas.pop(0) if deltas else Delta(content="")
            yield chunk_event(self._chunk(choice, first, logprobs))
        for delta in deltas:
            yield self._templates[choice].event(wire_json(delta))
        if events[-1].finish_reason is not None:
            yield chunk_event(self._chunk(choice, Delta(), finish_reason=_finish_reason(answer)))

    def _begin(self, choice: int) -> bytes:
        self._answers[choice] = self._builder.new_answer()
        blank = Delta(content="")
        self._templates[choice] = ChunkTemplate(self._chunk(choice, blank), wire_json(blank))
        return chunk_event(self._chunk(choice, Delta(role="assistant", content="", refusal=None)))

    def last_chunks(self) -> Iterable[ChatChunk]:
        if self._builder.with_usage:
            yield self._with_choices([], usage=usage_body(self._builder.meter))

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
        usage = {"usage": None} if self._builder.with_usage else {}
        return self._with_choices([body], **usage)

    def _with_choices(self, choices: list[ChunkChoice], **usage: Any) -> ChatChunk:
        fields = self._builder.fields
        return ChatChunk(
            id=fields.id,
            object="chat.completion.chunk",
            created=fields.created,
            model=fields.model,
            system_fingerprint=fields.system_fingerprint,
            choices=choices,
            **usage,
        )


def delta_of(part: AnswerPart) -> Delta:
    """One part of an answer as the delta of a chunk."""
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
