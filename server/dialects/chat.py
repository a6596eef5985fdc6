"""OpenAI's chat completions, whole and streamed."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from engine.values.output import OutputEvent, TokenLogprob
from server.dialects.calls import CallShape, Deltas, call_shape
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
from server.schemas.chat import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatFinishReason,
    ChatRequest,
    ChoiceLogprobs,
    ChunkChoice,
    Delta,
)

LogprobRenderer = Callable[[Sequence[TokenLogprob]], ChoiceLogprobs | None]


def no_logprobs(entries: Sequence[TokenLogprob]) -> None:
    """The LogprobRenderer of requests that asked for none."""


class ChatBuilder:
    """A StreamingBuilder of chat completions."""

    def __init__(self, body: ChatRequest, task: ChatTask) -> None:
        self.engine = task.model.engine
        self.requests = [task.request]
        self.meter = task.meter
        self.is_streamed = body.stream
        self.new_answer = task.new_answer
        self.with_usage = body.include_usage
        self.calls = call_shape(body)
        self.tier: dict[str, Any] = {} if body.service_tier is None else {"service_tier": "default"}
        self.fields = ResponseFields(
            id=f"chatcmpl-{task.request.id}",
            created=int(time.time()),
            model=task.model.name,
            system_fingerprint=task.model.fingerprint,
        )
        self.logprobs: LogprobRenderer = no_logprobs
        if body.logprobs:
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
                    message=_message(choice.answer, self.calls),
                    logprobs=self.logprobs(choice.logprobs),
                    finish_reason=_finish_reason(choice.answer, self.calls),
                )
                for index, choice in enumerate(choices)
            ],
            usage=usage_body(self.meter),
            **self.tier,
        )
        return wire_json(completion)


def _message(answer: ChatAnswer, calls: CallShape) -> AssistantMessage:
    """The content is null beside calls that have no text, else text, which may be empty."""
    extras: dict[str, Any] = calls.fields(answer.calls) if answer.calls else {}
    if answer.reasoning:
        extras |= {"reasoning_content": answer.reasoning, "reasoning": answer.reasoning}
    content = None if answer.calls and not answer.content else answer.content
    return AssistantMessage(role="assistant", content=content, refusal=None, **extras)


def _finish_reason(answer: ChatAnswer, calls: CallShape) -> ChatFinishReason:
    wire = wire_finish_reason(answer.finish_reason)
    return calls.finish_reason if wire == "stop" and answer.calls else wire


class ChatWriter(ChunkWriter):
    """The chunks of one streamed chat completion."""

    def __init__(self, builder: ChatBuilder) -> None:
        self._builder = builder
        self._answers: dict[int, ChatAnswer] = {}
        self._deltas: dict[int, Deltas] = {}
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
        reason = events[-1].finish_reason
        deltas = [*self._deltas[choice].add(answer.add_all(events))]
        if reason is not None:
            deltas += self._deltas[choice].close()
        entries = [entry for event in events for entry in event.logprobs]
        logprobs = self._builder.logprobs(entries) if entries else None
        if logprobs is not None:
            first = deltas.pop(0) if deltas else Delta(content="")
            yield chunk_event(self._chunk(choice, first, logprobs))
        for delta in deltas:
            yield self._templates[choice].event(wire_json(delta))
        if reason is not None:
            finish_reason = _finish_reason(answer, self._builder.calls)
            yield chunk_event(self._chunk(choice, Delta(), finish_reason=finish_reason))

    def _begin(self, choice: int) -> bytes:
        self._answers[choice] = self._builder.new_answer()
        self._deltas[choice] = self._builder.calls.deltas()
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
        finish_reason: ChatFinishReason | None = None,
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
            **self._builder.tier,
            **usage,
        )
