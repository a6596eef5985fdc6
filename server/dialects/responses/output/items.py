"""An answer's parts as the output of a response: its items, and their events."""

from collections.abc import Callable
from dataclasses import dataclass

from server.dialects.responses.output.open_items import (
    ItemEvents,
    ItemPosition,
    Logprobs,
    OpenCall,
    OpenCustomCall,
    OpenItem,
    OpenMessage,
    OpenReasoning,
    OpenSummary,
)
from server.dialects.responses.tools import RequestTools
from server.parsing.parts import AnswerPart, CallBegun, Content, Reasoning
from server.schemas.responses.output import ItemStatus, OutputItem


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
