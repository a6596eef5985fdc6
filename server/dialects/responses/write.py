"""The output items of a response, and the events of their growth."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from pydantic_core import to_json

from engine.values.model import Tokenizer
from engine.values.output import FinishReason, OutputEvent, TokenLogprob
from server.dialects.logprobs import chat_logprobs
from server.dialects.responses.answer import (
    ArgumentsDelta,
    ArgumentsDone,
    CustomInputDelta,
    CustomInputDone,
    CustomToolCallOutput,
    FunctionCallOutput,
    ItemEvent,
    ItemStatus,
    OutputItem,
    OutputItemEvent,
    OutputMessage,
    OutputText,
    OutputTextDelta,
    OutputTextDone,
    PartEvent,
    ReasoningOutput,
    ReasoningText,
    ReasoningTextDelta,
    ReasoningTextDone,
    SummaryPartEvent,
    SummaryText,
    SummaryTextDelta,
    SummaryTextDone,
    seal,
)
from server.dialects.responses.tools import ClientTool, RequestTools
from server.generation.answer import ChatAnswer
from server.generation.tools import custom_input
from server.parsing.parts import AnswerPart, CallArguments, CallBegun, Content, Reasoning

ItemEvents = Iterator[OutputItemEvent]
Logprobs: TypeAlias = bytes
"""Logprobs of some tokens as JSON: members of a list, without its brackets."""


@dataclass(frozen=True, slots=True)
class ItemPosition:
    """An item's index in its response. `number` returns the next event's sequence number."""

    suffix: str
    index: int
    number: Callable[[], int]

    def id(self, kind: str) -> str:
        return f"{kind}_{self.suffix}{self.index:02x}"


class OpenItem(ABC):
    """An item that is being written, until `end` completes it."""

    kind: str

    def __init__(self, position: ItemPosition) -> None:
        self.id = position.id(self.kind)
        self._position = position
        self._texts: list[str] = []

    def begin(self) -> ItemEvents:
        yield self._event("response.output_item.added", self.empty())
        yield from self.opened()

    def add(self, text: str, logprobs: Logprobs) -> ItemEvents:
        self._texts.append(text)
        yield from self.grown(text, logprobs)

    def end(self, status: ItemStatus) -> ItemEvents:
        text = "".join(self._texts)
        yield from self.closed(text)
        self.complete = self.whole(text, status)
        yield self._event("response.output_item.done", self.complete)

    @abstractmethod
    def takes(self, part: AnswerPart) -> bool:
        """Whether the part continues this item."""

    @abstractmethod
    def empty(self) -> OutputItem: ...

    @abstractmethod
    def whole(self, text: str, status: ItemStatus) -> OutputItem: ...

    def opened(self) -> ItemEvents:
        """The events that follow `response.output_item.added`."""
        return iter(())

    @abstractmethod
    def grown(self, text: str, logprobs: Logprobs) -> ItemEvents: ...

    @abstractmethod
    def closed(self, text: str) -> ItemEvents:
        """The events that precede `response.output_item.done`."""

    def at(self) -> dict[str, Any]:
        """The position's fields in the next event."""
        return {
            "sequence_number": self._position.number(),
            "item_id": self.id,
            "output_index": self._position.index,
        }

    def _event(
        self,
        type: Literal["response.output_item.added", "response.output_item.done"],
        item: OutputItem,
    ) -> ItemEvent:
        number, index = self._position.number(), self._position.index
        return ItemEvent(type=type, sequence_number=number, output_index=index, item=item)


class OpenMessage(OpenItem):
    """Text for the user: a `message`."""

    kind = "msg"

    def __init__(self, position: ItemPosition) -> None:
        super().__init__(position)
        self._logprobs: list[Logprobs] = []

    def takes(self, part: AnswerPart) -> bool:
        return isinstance(part, Content)

    def empty(self) -> OutputMessage:
        return self._message("in_progress", [])

    def whole(self, text: str, status: ItemStatus) -> OutputMessage:
        return self._message(status, [self._part(text)])

    def opened(self) -> ItemEvents:
        part = _text_part("", b"")
        yield PartEvent(**self.at(), type="response.content_part.added", content_index=0, part=part)

    def grown(self, text: str, logprobs: Logprobs) -> ItemEvents:
        if logprobs:
            self._logprobs.append(logprobs)
        yield OutputTextDelta(
            **self.at(),
            type="response.output_text.delta",
            content_index=0,
            delta=text,
            logprobs=[],
        ).with_rendered_logprobs(logprobs)

    def closed(self, text: str) -> ItemEvents:
        self._logprobs = [b",".join(self._logprobs)]
        yield OutputTextDone(
            **self.at(),
            type="response.output_text.done",
            content_index=0,
            text=text,
            logprobs=[],
        ).with_rendered_logprobs(self._logprobs[0])
        yield PartEvent(
            **self.at(),
            type="response.content_part.done",
            content_index=0,
            part=self._part(text),
        )

    def _part(self, text: str) -> OutputText:
        return _text_part(text, self._logprobs[0])

    def _message(self, status: ItemStatus, content: list[OutputText]) -> OutputMessage:
        return OutputMessage(
            id=self.id, type="message", status=status, role="assistant", content=content
        )


def _text_part(text: str, logprobs: Logprobs) -> OutputText:
    part = OutputText(type="output_text", text=text, annotations=[], logprobs=[])
    return part.with_rendered_logprobs(logprobs)


class OpenThought(OpenItem):
    """Reasoning. With `is_sealed` it has `encrypted_content`, which clients send back where
    nothing is stored.
    """

    kind = "rs"

    def __init__(self, position: ItemPosition, is_sealed: bool) -> None:
        super().__init__(position)
        self._is_sealed = is_sealed

    def takes(self, part: AnswerPart) -> bool:
        return isinstance(part, Reasoning)

    def sealed(self, text: str) -> dict[str, str]:
        return {"encrypted_content": seal(text)} if self._is_sealed else {}

    def empty(self) -> ReasoningOutput:
        return ReasoningOutput(id=self.id, type="reasoning", status="in_progress", summary=[])


class OpenReasoning(OpenThought):
    """Reasoning as its full text."""

    def opened(self) -> ItemEvents:
        yield self._part("response.content_part.added", "")

    def grown(self, text: str, logprobs: Logprobs) -> ItemEvents:
        yield ReasoningTextDelta(
            **self.at(), type="response.reasoning_text.delta", content_index=0, delta=text
        )

    def closed(self, text: str) -> ItemEvents:
        yield ReasoningTextDone(
            **self.at(), type="response.reasoning_text.done", content_index=0, text=text
        )
        yield self._part("response.content_part.done", text)

    def whole(self, text: str, status: ItemStatus) -> ReasoningOutput:
        return ReasoningOutput(
            id=self.id,
            type="reasoning",
            status=status,
            summary=[],
            content=[ReasoningText(type="reasoning_text", text=text)],
            **self.sealed(text),
        )

    def _part(
        self, type: Literal["response.content_part.added", "response.content_part.done"], text: str
    ) -> PartEvent:
        part = ReasoningText(type="reasoning_text", text=text)
        return PartEvent(**self.at(), type=type, content_index=0, part=part)


class OpenSummary(OpenThought):
    """Reasoning of a request for a summary: its full text is sent as the summary."""

    def opened(self) -> ItemEvents:
        yield self._part("response.reasoning_summary_part.added", "")

    def grown(self, text: str, logprobs: Logprobs) -> ItemEvents:
        yield SummaryTextDelta(
            **self.at(), type="response.reasoning_summary_text.delta", summary_index=0, delta=text
        )

    def closed(self, text: str) -> ItemEvents:
        yield SummaryTextDone(
            **self.at(), type="response.reasoning_summary_text.done", summary_index=0, text=text
        )
        yield self._part("response.reasoning_summary_part.done", text)

    def whole(self, text: str, status: ItemStatus) -> ReasoningOutput:
        return ReasoningOutput(
            id=self.id,
            type="reasoning",
            status=status,
            summary=[SummaryText(type="summary_text", text=text)],
            **self.sealed(text),
        )

    def _part(
        self,
        type: Literal[
            "response.reasoning_summary_part.added", "response.reasoning_summary_part.done"
        ],
        text: str,
    ) -> SummaryPartEvent:
        part = SummaryText(type="summary_text", text=text)
        return SummaryPartEvent(**self.at(), type=type, summary_index=0, part=part)


class OpenToolCall(OpenItem):
    """A tool call."""

    def __init__(self, position: ItemPosition, call: CallBegun, tool: ClientTool) -> None:
        super().__init__(position)
        self._call = call
        self._tool = tool

    def takes(self, part: AnswerPart) -> bool:
        return isinstance(part, CallArguments) and part.index == self._call.index

    def named(self) -> dict[str, Any]:
        name = {"id": self.id, "call_id": self._call.id, "name": self._tool.name}
        return name | ({"namespace": self._tool.namespace} if self._tool.namespace else {})


class OpenCall(OpenToolCall):
    """A call of a function."""

    kind = "fc"

    def grown(self, text: str, logprobs: Logprobs) -> ItemEvents:
        yield ArgumentsDelta(**self.at(), type="response.function_call_arguments.delta", delta=text)

    def closed(self, text: str) -> ItemEvents:
        yield ArgumentsDone(
            **self.at(),
            type="response.function_call_arguments.done",
            name=self._tool.name,
            arguments=text,
        )

    def empty(self) -> FunctionCallOutput:
        return self.whole("", "in_progress")

    def whole(self, text: str, status: ItemStatus) -> FunctionCallOutput:
        return FunctionCallOutput(
            **self.named(), type="function_call", status=status, arguments=text
        )


class OpenCustomCall(OpenToolCall):
    """A call of a custom tool. Its input is read from the arguments when they are complete."""

    kind = "ctc"

    def grown(self, text: str, logprobs: Logprobs) -> ItemEvents:
        return iter(())

    def closed(self, text: str) -> ItemEvents:
        given = custom_input(text)
        yield CustomInputDelta(
            **self.at(), type="response.custom_tool_call_input.delta", delta=given
        )
        yield CustomInputDone(**self.at(), type="response.custom_tool_call_input.done", input=given)

    def empty(self) -> CustomToolCallOutput:
        return self._with_input("", "in_progress")

    def whole(self, text: str, status: ItemStatus) -> CustomToolCallOutput:
        return self._with_input(custom_input(text), status)

    def _with_input(self, given: str, status: ItemStatus) -> CustomToolCallOutput:
        return CustomToolCallOutput(
            **self.named(), type="custom_tool_call", status=status, input=given
        )


@dataclass(frozen=True, slots=True)
class OutputShape:
    """The form of a response's output, as the request asks for it."""

    tools: RequestTools
    with_summary: bool = False  # reasoning is sent as its summary
    with_sealed_reasoning: bool = False


class Output:
    """Builds the items of one response, one after the other.

    Their ids end in `suffix`; `number` returns each event's sequence number.
    """

    def __init__(self, shape: OutputShape, suffix: str, number: Callable[[], int]) -> None:
        self._shape = shape
        self._suffix = suffix
        self._number = number
        self._open: OpenItem | None = None
        self.items: list[OutputItem] = []
        """The complete ones."""

    def add(self, part: AnswerPart, logprobs: Logprobs = b"") -> ItemEvents:
        """The events of a part. Logprobs are those of its tokens."""
        if self._open is None or not self._open.takes(part):
            yield from self.close("completed")
            self._open = self._new(part)
            yield from self._open.begin()
        if not isinstance(part, CallBegun):
            yield from self._open.add(part.text, logprobs)

    def close(self, status: ItemStatus) -> ItemEvents:
        """End the open item, if there is one."""
        if self._open is not None:
            yield from self._open.end(status)
            self.items.append(self._open.complete)
            self._open = None

    def _new(self, part: AnswerPart) -> OpenItem:
        position = ItemPosition(self._suffix, len(self.items), self._number)
        match part:
            case Content():
                return OpenMessage(position)
            case Reasoning():
                thought = OpenSummary if self._shape.with_summary else OpenReasoning
                return thought(position, self._shape.with_sealed_reasoning)
            case CallBegun():
                tool = self._shape.tools.find(part.name)
                call = OpenCustomCall if tool.is_custom else OpenCall
                return call(position, part, tool)
            case _:
                raise ValueError(f"arguments of call {part.index}, which has not begun")


class ResponseAnswer:
    """Collects the events of the one sequence that a response has."""

    def __init__(self, answer: ChatAnswer, output: Output, tokenizer: Tokenizer) -> None:
        self._answer = answer
        self._tokenizer = tokenizer
        self._pending: list[TokenLogprob] = []  # of tokens since the last part
        self.output = output

    @property
    def finish_reason(self) -> FinishReason:
        return self._answer.finish_reason

    def add(self, event: OutputEvent) -> None:
        for _ in self.events([event]):
            pass

    def events(self, events: Sequence[OutputEvent]) -> ItemEvents:
        """The events of the output items. With logprobs they are made event by event: of parts that
        were joined it is not known which tokens they are made of.
        """
        if len(events) > 1 and any(event.logprobs for event in events):
            for event in events:
                yield from self.events([event])
            return
        for event in events:
            self._pending += event.logprobs
        for part in self._answer.add_all(events):
            logprobs = self._logprobs(part.text) if isinstance(part, Content) else b""
            yield from self.output.add(part, logprobs)
            self._pending = []
        if (reason := events[-1].finish_reason) is not None:
            is_cut_off = reason is FinishReason.LENGTH
            yield from self.output.close("incomplete" if is_cut_off else "completed")

    def _logprobs(self, text: str) -> Logprobs:
        """Of the last tokens that hold the text; those of markers before it are left out."""
        if not self._pending:
            return b""
        first, n_bytes = len(self._pending), len(text.encode())
        while first and n_bytes > 0:
            first -= 1
            n_bytes -= len(self._tokenizer.token_bytes(self._pending[first].token_id))
        logprobs = chat_logprobs(self._tokenizer, self._pending[first:]).content
        return to_json(logprobs)[1:-1]
