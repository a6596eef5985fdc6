"""The models of `/v1/responses` for the OpenAPI document: responses, output items, and the events
of a stream.

Answers are written as plain JSON objects (write.py), and no model validates them again.
"""

import base64
import binascii
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel

from server.dialects.errors import ResponsesErrorEvent
from server.dialects.openai import TokenLogprobBody
from server.json_model import SparseModel, wire_event

ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class OutputText(BaseModel):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[TokenLogprobBody]


class ReasoningText(BaseModel):
    type: Literal["reasoning_text"]
    text: str


class SummaryText(BaseModel):
    type: Literal["summary_text"]
    text: str


class _Item(SparseModel):
    id: str
    status: ItemStatus


class OutputMessage(_Item):
    type: Literal["message"]
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningOutput(_Item):
    type: Literal["reasoning"]
    summary: list[SummaryText]
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None


class _Call(_Item):
    call_id: str
    name: str
    namespace: str | None = None


class FunctionCallOutput(_Call):
    type: Literal["function_call"]
    arguments: str  # JSON


class CustomToolCallOutput(_Call):
    type: Literal["custom_tool_call"]
    input: str


OutputItem = OutputMessage | ReasoningOutput | FunctionCallOutput | CustomToolCallOutput


class InputTokensDetails(BaseModel):
    cached_tokens: int
    cache_write_tokens: int  # always 0: writing to the cache costs nothing


class OutputTokensDetails(BaseModel):
    reasoning_tokens: int


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(BaseModel):
    code: str
    message: str


class IncompleteDetails(BaseModel):
    reason: Literal["max_output_tokens"]


class ResponseBody(SparseModel):
    """A whole response."""

    id: str
    object: Literal["response"]
    created_at: int  # seconds since the epoch
    model: str
    background: bool
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    frequency_penalty: float
    max_tool_calls: int | None
    parallel_tool_calls: bool
    presence_penalty: float
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    user: str | None = None

    status: ResponseStatus
    completed_at: int | None
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    output: list[OutputItem]
    usage: ResponseUsage | None  # null until the response is complete


class InputItemList(BaseModel):
    """A page of the items that a response was made from."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(BaseModel):
    object: Literal["response.input_tokens"]
    input_tokens: int


class DeletedResponse(BaseModel):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


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


def _event(name: str, /, *types: str, **fields: Any) -> type[BaseModel]:
    """The model of an event within an item, with these fields in addition to the common ones."""
    return wire_event(name, *types, sequence_number=int, item_id=str, output_index=int, **fields)


def _text_events(name: str, type: str, key: str, **fields: Any) -> Sequence[type[BaseModel]]:
    """The models of the events in which a text grows and ends. Both have these fields."""
    delta = _event(f"{name}Delta", f"{type}.delta", delta=str, **fields)
    return delta, _event(f"{name}Done", f"{type}.done", **{key: str}, **fields)


_LOGPROBS = list[TokenLogprobBody]
_PART, _SUMMARY_PART = "response.content_part", "response.reasoning_summary_part"

RESPONSE_EVENTS: Sequence[type[BaseModel]] = (
    StatusEvent,
    ItemEvent,
    _event(
        "PartEvent",
        *(f"{_PART}.added", f"{_PART}.done"),
        content_index=int,
        part=OutputText | ReasoningText,
    ),
    *_text_events(
        "OutputText", "response.output_text", "text", content_index=int, logprobs=_LOGPROBS
    ),
    *_text_events("ReasoningText", "response.reasoning_text", "text", content_index=int),
    _event(
        "SummaryPartEvent",
        *(f"{_SUMMARY_PART}.added", f"{_SUMMARY_PART}.done"),
        summary_index=int,
        part=SummaryText,
    ),
    *_text_events("SummaryText", "response.reasoning_summary_text", "text", summary_index=int),
    _event("ArgumentsDelta", "response.function_call_arguments.delta", delta=str),
    _event("ArgumentsDone", "response.function_call_arguments.done", name=str, arguments=str),
    *_text_events("CustomInput", "response.custom_tool_call_input", "input"),
    ResponsesErrorEvent,
)

_PREFIX = "rootstock1:"  # it tells the content from that of other servers


def seal(reasoning: str) -> str:
    """Reasoning as `encrypted_content`, which clients send back where the server stores nothing.

    It is the text in base64, not encrypted: the client may read it anyway.
    """
    return _PREFIX + base64.urlsafe_b64encode(reasoning.encode()).decode()


def unseal(content: str) -> str:
    """The reasoning in `encrypted_content`; empty for content of other servers."""
    if not content.startswith(_PREFIX):
        return ""
    try:
        return base64.urlsafe_b64decode(content.removeprefix(_PREFIX)).decode()
    except (binascii.Error, ValueError):
        return ""
