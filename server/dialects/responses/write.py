"""The output items of a response, and the events of their growth."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal, TypeAlias

from pydantic_core import to_json

from engine.values.model import Tokenizer
from engine.values.output import FinishReason, TokenLogprob
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
from server.dialects.responses.tools import RequestTools, ToolName
from server.generation.choice import Block, Choice, Closed, Grew, Opened, Step
from server.generation.tools import custom_input

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

    def __init__(self, position: ItemPosition, call: Block, tool: ToolName) -> None:
        super().__init__(position)
        self._call = call
        self._tool = tool

    def named(self) -> dict[str, Any]:
        name = {"id": self.id, "call_id": self._call.call_id, "name": self._tool.name}
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

    def __init__(
        self, shape: OutputShape, suffix: str, number: Callable[[], int], tokenizer: Tokenizer
    ) -> None:
        self._shape = shape
        self._suffix = suffix
        self._number = number
        self._tokenizer = tokenizer
        self._open: OpenItem | None = None
        self.items: list[OutputItem] = []
        """The complete ones."""

    def add(self, step: Step, *, is_cut_off: bool = False) -> ItemEvents:
        """The events of a step. An item is incomplete if the answer `is_cut_off` within it."""
        match step:
            case Opened(block):
                self._open = self._new(block)
                yield from self._open.begin()
            case Grew(_, text, logprobs):
                assert self._open is not None
                yield from self._open.add(text, self._rendered(logprobs))
            case Closed():
                assert self._open is not None
                yield from self._open.end("incomplete" if is_cut_off else "completed")
                self.items.append(self._open.complete)

    def _new(self, block: Block) -> OpenItem:
        position = ItemPosition(self._suffix, len(self.items), self._number)
        match block.kind:
            case "text":
                return OpenMessage(position)
            case "reasoning":
                thought = OpenSummary if self._shape.with_summary else OpenReasoning
                return thought(position, self._shape.with_sealed_reasoning)
            case "call":
                tool = self._shape.tools.find(block.name)
                call = OpenCustomCall if tool.is_custom else OpenCall
                return call(position, block, tool)

    def _rendered(self, logprobs: Sequence[TokenLogprob]) -> Logprobs:
        return to_json(chat_logprobs(self._tokenizer, logprobs))[1:-1] if logprobs else b""


def output_items(
    choice: Choice, shape: OutputShape, suffix: str, tokenizer: Tokenizer
) -> list[OutputItem]:
    """The items of a whole answer. The last is incomplete where the answer was cut off."""
    numbers = count()
    output = Output(shape, suffix, lambda: next(numbers), tokenizer)
    for block in choice.blocks:
        is_last = block is choice.blocks[-1]
        is_cut_off = is_last and choice.finish_reason is FinishReason.LENGTH
        for step in (Opened(block), Grew(block, block.text, block.logprobs), Closed(block)):
            for _ in output.add(step, is_cut_off=is_cut_off):
                pass
    return output.items
