"""An answer as the output of a response: items, and events as they come about."""

from collections.abc import Callable
from dataclasses import dataclass

from server.dialects.responses.output.open_items import (
    Logprobs,
    News,
    OpenCall,
    OpenCustomCall,
    OpenItem,
    OpenMessage,
    OpenReasoning,
    OpenSummary,
    Place,
)
from server.dialects.responses.toolbox import Toolbox
from server.parsing.parts import CallBegun, Content, Part, Reasoning
from server.schemas.responses.output import ItemStatus, OutputItem


@dataclass(frozen=True, slots=True)
class OutputShape:
    """What a request wants to see of its answer."""

    toolbox: Toolbox
    with_summary: bool = False  # of reasoning, in place of its text
    with_sealed_reasoning: bool = False


class Output:
    """The items of one response, one after the other.

    `suffix` makes their ids its own, and `number` numbers the events.
    """

    def __init__(self, shape: OutputShape, suffix: str, number: Callable[[], int]) -> None:
        self._shape = shape
        self._suffix = suffix
        self._number = number
        self._open: OpenItem | None = None
        self.items: list[OutputItem] = []
        """Those that are complete."""

    def add(self, part: Part, logprobs: Logprobs = b"") -> News:
        """News of a part. Logprobs are those of the tokens that it is made of."""
        if self._open is None or not self._open.takes(part):
            yield from self.close("completed")
            self._open = self._new(part)
            yield from self._open.begin()
        if not isinstance(part, CallBegun):
            yield from self._open.add(part.text, logprobs)

    def close(self, status: ItemStatus) -> News:
        """End the item that is open, if any."""
        if self._open is not None:
            yield from self._open.end(status)
            self.items.append(self._open.complete)
            self._open = None

    def _new(self, part: Part) -> OpenItem:
        place = Place(self._suffix, len(self.items), self._number)
        match part:
            case Content():
                return OpenMessage(place)
            case Reasoning():
                thought = OpenSummary if self._shape.with_summary else OpenReasoning
                return thought(place, self._shape.with_sealed_reasoning)
            case CallBegun():
                tool = self._shape.toolbox.find(part.name)
                call = OpenCustomCall if tool.is_custom else OpenCall
                return call(place, part, tool)
            case _:
                raise ValueError(f"arguments of call {part.index}, which has not begun")
