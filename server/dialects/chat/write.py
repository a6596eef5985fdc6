"""Chat completions, whole and streamed, and the shapes in which they contain calls."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from engine.values.output import OutputEvent, TokenLogprob
from server.dialects.base import generated, wire_json
from server.dialects.chat.schema import (
    AssistantMessage,
    CalledCustomTool,
    CalledFunction,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatFinishReason,
    ChatRequest,
    ChunkChoice,
    CustomDelta,
    CustomToolCallBody,
    CustomToolCallDelta,
    Delta,
    FunctionDelta,
    ToolCallBody,
    ToolCallDelta,
)
from server.dialects.logprobs import ChoiceLogprobs, chat_logprobs
from server.dialects.openai import (
    ChunkTemplate,
    ChunkWriter,
    ResponseFields,
    chunk_event,
    usage_body,
    wire_finish_reason,
)
from server.generation.answer import ChatAnswer, WholeAnswer, WrittenCall
from server.generation.chat_task import ChatTask
from server.generation.tools import ChatCustomTool, custom_input
from server.parsing.parts import AnswerPart, CallArguments, CallBegun, Content, Reasoning


def call_shape(body: ChatRequest) -> "CallShape":
    """The shape in which a request's answers have calls."""
    if body.functions:
        return FunctionCallShape()
    return ToolCallShape(
        frozenset(tool.custom.name for tool in body.tools if isinstance(tool, ChatCustomTool))
    )


class Deltas(ABC):
    """The parts of one answer as the deltas of its chunks."""

    def add(self, parts: Iterable[AnswerPart]) -> Iterator[Delta]:
        for part in parts:
            match part:
                case Content(text):
                    yield from self.close()
                    yield Delta(content=text)
                case Reasoning(text):
                    yield from self.close()
                    yield Delta(reasoning_content=text, reasoning=text)
                case CallBegun():
                    yield from self.close()
                    yield from self.begun(part)
                case CallArguments():
                    yield from self.grown(part)

    def close(self) -> Iterator[Delta]:
        """What is still to be said of the call that began last."""
        return iter(())

    @abstractmethod
    def begun(self, call: CallBegun) -> Iterator[Delta]: ...

    @abstractmethod
    def grown(self, call: CallArguments) -> Iterator[Delta]: ...


class CallShape(ABC):
    """How the calls of an answer are written."""

    finish_reason: ChatFinishReason

    @abstractmethod
    def fields(self, calls: Sequence[WrittenCall]) -> dict[str, Any]:
        """The fields of a message with these calls, of which there is one at least."""

    @abstractmethod
    def deltas(self) -> Deltas: ...


class ToolCallShape(CallShape):
    """`tool_calls`, of functions and of the `custom` tools with these names."""

    finish_reason = "tool_calls"

    def __init__(self, custom: frozenset[str]) -> None:
        self._custom = custom

    def fields(self, calls: Sequence[WrittenCall]) -> dict[str, Any]:
        return {"tool_calls": [self._body(call) for call in calls]}

    def deltas(self) -> Deltas:
        return _ToolCallDeltas(self._custom)

    def _body(self, call: WrittenCall) -> ToolCallBody | CustomToolCallBody:
        if call.name in self._custom:
            custom = CalledCustomTool(name=call.name, input=custom_input(call.arguments))
            return CustomToolCallBody(id=call.id, type="custom", custom=custom)
        function = CalledFunction(name=call.name, arguments=call.arguments)
        return ToolCallBody(id=call.id, type="function", function=function)


class _ToolCallDeltas(Deltas):
    """The input of a custom tool is read from the arguments when they are complete."""

    def __init__(self, custom: frozenset[str]) -> None:
        self._custom = custom
        self._open: CallBegun | None = None  # of a custom tool
        self._arguments: list[str] = []  # the open call's

    def begun(self, call: CallBegun) -> Iterator[Delta]:
        index, id, name = call.index, call.id, call.name
        if name in self._custom:
            self._open, self._arguments = call, []
            custom = CustomDelta(name=name, input="")
            yield _tool(CustomToolCallDelta(index=index, id=id, type="custom", custom=custom))
        else:
            function = FunctionDelta(name=name, arguments="")
            yield _tool(ToolCallDelta(index=index, id=id, type="function", function=function))

    def grown(self, call: CallArguments) -> Iterator[Delta]:
        if self._open is not None:
            self._arguments.append(call.text)
        else:
            function = FunctionDelta(arguments=call.text)
            yield _tool(ToolCallDelta(index=call.index, function=function))

    def close(self) -> Iterator[Delta]:
        if self._open is not None:
            custom = CustomDelta(input=custom_input("".join(self._arguments)))
            yield _tool(CustomToolCallDelta(index=self._open.index, custom=custom))
            self._open = None


def _tool(call: ToolCallDelta | CustomToolCallDelta) -> Delta:
    return Delta(tool_calls=[call])


class FunctionCallShape(CallShape):
    """A `function_call`, of which a message has one: the first."""

    finish_reason = "function_call"

    def fields(self, calls: Sequence[WrittenCall]) -> dict[str, Any]:
        call = calls[0]
        return {"function_call": CalledFunction(name=call.name, arguments=call.arguments)}

    def deltas(self) -> Deltas:
        return _FunctionCallDeltas()


class _FunctionCallDeltas(Deltas):
    def begun(self, call: CallBegun) -> Iterator[Delta]:
        if call.index == 0:
            yield Delta(function_call=FunctionDelta(name=call.name, arguments=""))

    def grown(self, call: CallArguments) -> Iterator[Delta]:
        if call.index == 0:
            yield Delta(function_call=FunctionDelta(arguments=call.text))


LogprobRenderer = Callable[[Sequence[TokenLogprob]], ChoiceLogprobs | None]


def no_logprobs(entries: Sequence[TokenLogprob]) -> None:
    """The LogprobRenderer of requests without log-probabilities."""


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
    """The content is null if there are calls and no text, else text, which may be empty."""
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
