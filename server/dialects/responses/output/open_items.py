"""Items of a response while a model writes them, and the events that tell of them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from server.dialects.responses.sealed import seal
from server.dialects.responses.toolbox import ToolName, custom_input
from server.parsing.parts import CallArguments, CallBegun, Content, Part, Reasoning
from server.schemas.responses.events import (
    ArgumentsDelta,
    ArgumentsDone,
    CustomInputDelta,
    CustomInputDone,
    ItemEvent,
    ItemNews,
    OutputTextDelta,
    OutputTextDone,
    PartEvent,
    ReasoningTextDelta,
    ReasoningTextDone,
    SummaryPartEvent,
    SummaryTextDelta,
    SummaryTextDone,
)
from server.schemas.responses.output import (
    CustomToolCallOutput,
    FunctionCallOutput,
    ItemStatus,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningOutput,
    ReasoningText,
    SummaryText,
)

News = Iterator[ItemNews]
Logprobs: TypeAlias = bytes
"""Of some tokens: members of a JSON list."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where an item stands among those of its response. `number` gives the next event's."""

    suffix: str
    index: int
    number: Callable[[], int]

    def id(self, kind: str) -> str:
        return f"{kind}_{self.suffix}{self.index:02x}"


class OpenItem(ABC):
    """An item that grows, until its end says how it ended."""

    kind: str

    def __init__(self, place: Place) -> None:
        self.id = place.id(self.kind)
        self._place = place
        self._texts: list[str] = []

    def begin(self) -> News:
        yield self._event("response.output_item.added", self.empty())
        yield from self.opened()

    def add(self, text: str, logprobs: Logprobs) -> News:
        self._texts.append(text)
        yield from self.grown(text, logprobs)

    def end(self, status: ItemStatus) -> News:
        text = "".join(self._texts)
        yield from self.closed(text)
        self.complete = self.whole(text, status)
        yield self._event("response.output_item.done", self.complete)

    @abstractmethod
    def takes(self, part: Part) -> bool:
        """Whether the part is more of it."""

    @abstractmethod
    def empty(self) -> OutputItem: ...

    @abstractmethod
    def whole(self, text: str, status: ItemStatus) -> OutputItem: ...

    def opened(self) -> News:
        """What follows the news that there is such an item."""
        return iter(())

    @abstractmethod
    def grown(self, text: str, logprobs: Logprobs) -> News: ...

    @abstractmethod
    def closed(self, text: str) -> News:
        """What goes before the news that the item is complete."""

    def at(self) -> dict[str, Any]:
        """What the next event says of the place."""
        return {
            "sequence_number": self._place.number(),
            "item_id": self.id,
            "output_index": self._place.index,
        }

    def _event(
        self,
        type: Literal["response.output_item.added", "response.output_item.done"],
        item: OutputItem,
    ) -> ItemEvent:
        number, index = self._place.number(), self._place.index
        return ItemEvent(type=type, sequence_number=number, output_index=index, item=item)


class OpenMessage(OpenItem):
    """Text for the user."""

    kind = "msg"

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._logprobs: list[Logprobs] = []

    def takes(self, part: Part) -> bool:
        return isinstance(part, Content)

    def empty(self) -> OutputMessage:
        return self._message("in_progress", [])

    def whole(self, text: str, status: ItemStatus) -> OutputMessage:
        return self._message(status, [self._part(text)])

    def opened(self) -> News:
        part = _text_part("", b"")
        yield PartEvent(**self.at(), type="response.content_part.added", content_index=0, part=part)

    def grown(self, text: str, logprobs: Logprobs) -> News:
        if logprobs:
            self._logprobs.append(logprobs)
        yield OutputTextDelta(
            **self.at(),
            type="response.output_text.delta",
            content_index=0,
            delta=text,
            logprobs=[],
        ).with_rendered(logprobs)

    def closed(self, text: str) -> News:
        self._logprobs = [b",".join(self._logprobs)]
        yield OutputTextDone(
            **self.at(),
            type="response.output_text.done",
            content_index=0,
            text=text,
            logprobs=[],
        ).with_rendered(self._logprobs[0])
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
    return part.with_rendered(logprobs)


class OpenThought(OpenItem):
    """Reasoning. Sealed, it can be carried by a client for a server that stores nothing."""

    kind = "rs"

    def __init__(self, place: Place, is_sealed: bool) -> None:
        super().__init__(place)
        self._is_sealed = is_sealed

    def takes(self, part: Part) -> bool:
        return isinstance(part, Reasoning)

    def sealed(self, text: str) -> dict[str, str]:
        return {"encrypted_content": seal(text)} if self._is_sealed else {}

    def empty(self) -> ReasoningOutput:
        return ReasoningOutput(id=self.id, type="reasoning", status="in_progress", summary=[])


class OpenReasoning(OpenThought):
    """Reasoning as it is."""

    def opened(self) -> News:
        yield self._part("response.content_part.added", "")

    def grown(self, text: str, logprobs: Logprobs) -> News:
        yield ReasoningTextDelta(
            **self.at(), type="response.reasoning_text.delta", content_index=0, delta=text
        )

    def closed(self, text: str) -> News:
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
    """Reasoning for who asked for a summary of it: the model's own words are shown as that."""

    def opened(self) -> News:
        yield self._part("response.reasoning_summary_part.added", "")

    def grown(self, text: str, logprobs: Logprobs) -> News:
        yield SummaryTextDelta(
            **self.at(), type="response.reasoning_summary_text.delta", summary_index=0, delta=text
        )

    def closed(self, text: str) -> News:
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
    """A call of the tool with that name."""

    def __init__(self, place: Place, call: CallBegun, tool: ToolName) -> None:
        super().__init__(place)
        self._call = call
        self._tool = tool

    def takes(self, part: Part) -> bool:
        return isinstance(part, CallArguments) and part.index == self._call.index

    def named(self) -> dict[str, Any]:
        name = {"id": self.id, "call_id": self._call.id, "name": self._tool.name}
        return name | ({"namespace": self._tool.namespace} if self._tool.namespace else {})


class OpenCall(OpenToolCall):
    """Of a function."""

    kind = "fc"

    def grown(self, text: str, logprobs: Logprobs) -> News:
        yield ArgumentsDelta(**self.at(), type="response.function_call_arguments.delta", delta=text)

    def closed(self, text: str) -> News:
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
    """Of a custom tool. Its input is read out of the arguments when they are whole."""

    kind = "ctc"

    def grown(self, text: str, logprobs: Logprobs) -> News:
        return iter(())

    def closed(self, text: str) -> News:
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
