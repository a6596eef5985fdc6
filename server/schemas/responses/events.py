"""Events of a streamed response. `sequence_number` counts all of a stream from 0."""

from typing import Literal, TypeAlias, get_args

from pydantic import BaseModel

from server.schemas.responses.output import (
    HasLogprobs,
    OutputItem,
    OutputText,
    ReasoningText,
    SummaryText,
)
from server.schemas.responses.response import ResponseBody


class StatusEvent(BaseModel):
    type: Literal[
        "response.created",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    sequence_number: int
    response: ResponseBody


class ItemEvent(BaseModel):
    type: Literal["response.output_item.added", "response.output_item.done"]
    sequence_number: int
    output_index: int
    item: OutputItem


class ItemEventFields(BaseModel):
    """Fields of all events within an item."""

    sequence_number: int
    item_id: str
    output_index: int


class PartEvent(ItemEventFields):
    type: Literal["response.content_part.added", "response.content_part.done"]
    content_index: int
    part: OutputText | ReasoningText


class OutputTextDelta(ItemEventFields, HasLogprobs):
    type: Literal["response.output_text.delta"]
    content_index: int
    delta: str


class OutputTextDone(ItemEventFields, HasLogprobs):
    type: Literal["response.output_text.done"]
    content_index: int
    text: str


class ReasoningTextDelta(ItemEventFields):
    type: Literal["response.reasoning_text.delta"]
    content_index: int
    delta: str


class ReasoningTextDone(ItemEventFields):
    type: Literal["response.reasoning_text.done"]
    content_index: int
    text: str


class SummaryPartEvent(ItemEventFields):
    type: Literal["response.reasoning_summary_part.added", "response.reasoning_summary_part.done"]
    summary_index: int
    part: SummaryText


class SummaryTextDelta(ItemEventFields):
    type: Literal["response.reasoning_summary_text.delta"]
    summary_index: int
    delta: str


class SummaryTextDone(ItemEventFields):
    type: Literal["response.reasoning_summary_text.done"]
    summary_index: int
    text: str


class ArgumentsDelta(ItemEventFields):
    type: Literal["response.function_call_arguments.delta"]
    delta: str


class ArgumentsDone(ItemEventFields):
    type: Literal["response.function_call_arguments.done"]
    name: str
    arguments: str


class CustomInputDelta(ItemEventFields):
    type: Literal["response.custom_tool_call_input.delta"]
    delta: str


class CustomInputDone(ItemEventFields):
    type: Literal["response.custom_tool_call_input.done"]
    input: str


OutputItemEvent: TypeAlias = (
    ItemEvent
    | PartEvent
    | OutputTextDelta
    | OutputTextDone
    | ReasoningTextDelta
    | ReasoningTextDone
    | SummaryPartEvent
    | SummaryTextDelta
    | SummaryTextDone
    | ArgumentsDelta
    | ArgumentsDone
    | CustomInputDelta
    | CustomInputDone
)
"""An event of a response's output."""

RESPONSE_EVENTS = (StatusEvent, *get_args(OutputItemEvent))
