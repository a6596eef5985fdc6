"""Items of a conversation, as clients send them: messages, calls with their outputs, reasoning."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from server.schemas.base import RequestModel, type_of
from server.schemas.errors import UNSUPPORTED

MAX_ITEMS = 10_000
MAX_PARTS = 1000
ITEM_TYPES = frozenset(
    {"message", "function_call", "function_call_output", "custom_tool_call",
     "custom_tool_call_output", "reasoning", "item_reference"}
)  # fmt: skip

ItemId = Annotated[str, Field(max_length=256)]


class SpokenText(RequestModel):
    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: str


class SpokenRefusal(RequestModel):
    type: Literal["refusal"]
    refusal: str


class UnseenPart(RequestModel):
    """An image or a file in a tool's output. The prompt says that it cannot be seen."""

    type: Literal["input_image", "input_file"]


def _part_kind(part: object) -> str:
    kinds = {"refusal": "Refusal", "input_image": "Unseen", "input_file": "Unseen"}
    return kinds.get(type_of(part), "Text")


def _text_alone(part: object) -> object:
    kind = type_of(part)
    if kind.startswith("input_") and kind != "input_text":
        message = "parts of type '{kind}' are not supported, only text"
        raise PydanticCustomError(UNSUPPORTED, message, {"kind": kind[:64]})
    return part


_Text = Annotated[SpokenText, Tag("Text")]
_Refusal = Annotated[SpokenRefusal, Tag("Refusal")]
_Unseen = Annotated[UnseenPart, Tag("Unseen")]
MessagePart = Annotated[
    _Text | _Refusal,
    Discriminator(_part_kind),
    BeforeValidator(_text_alone, json_schema_input_type=SpokenText | SpokenRefusal),
]
OutputPart = Annotated[_Text | _Refusal | _Unseen, Discriminator(_part_kind)]


def _as_parts(content: object) -> object:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise PydanticCustomError("content", "must be a string or a list of parts")
    return content


_MessageParts = Annotated[list[MessagePart], Field(max_length=MAX_PARTS, fail_fast=True)]
_OutputParts = Annotated[list[OutputPart], Field(max_length=MAX_PARTS, fail_fast=True)]
_TextParts = Annotated[list[SpokenText], Field(max_length=MAX_PARTS, fail_fast=True)]
MessageContent = Annotated[
    _MessageParts, BeforeValidator(_as_parts, json_schema_input_type=str | _MessageParts)
]
OutputContent = Annotated[
    _OutputParts, BeforeValidator(_as_parts, json_schema_input_type=str | _OutputParts)
]


class MessageItem(RequestModel):
    """A message of any role."""

    type: Literal["message"] = "message"
    id: ItemId | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: MessageContent


class FunctionCallItem(RequestModel):
    """A call that the model made. `namespace` is that of the tool, where it has one."""

    type: Literal["function_call"]
    id: ItemId | None = None
    call_id: ItemId
    name: str
    namespace: str | None = None
    arguments: str


class CustomToolCallItem(RequestModel):
    """The same of a tool whose input is free text."""

    type: Literal["custom_tool_call"]
    id: ItemId | None = None
    call_id: ItemId
    name: str
    namespace: str | None = None
    input: str


class ToolOutputItem(RequestModel):
    """The output of a tool call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    id: ItemId | None = None
    call_id: ItemId
    output: OutputContent


class ReasoningItem(RequestModel):
    """Reasoning: `content`, `encrypted_content` or `summary`, the first of these that is there."""

    type: Literal["reasoning"]
    id: ItemId | None = None
    content: _TextParts = Field(default_factory=list)
    summary: _TextParts = Field(default_factory=list)
    encrypted_content: str | None = None


class ItemReference(RequestModel):
    """An item that is stored. Clients may leave the type out."""

    type: Literal["item_reference"] = "item_reference"
    id: ItemId


def _known(item: object) -> object:
    kind = type_of(item)
    if kind and kind not in ITEM_TYPES:
        message = "items of type '{kind}' are not supported"
        raise PydanticCustomError(UNSUPPORTED, message, {"kind": kind[:64]})
    return item


def _item_kind(item: object) -> str:
    """The tag of an item's model: a name that errors leave out of the place."""
    return {
        "function_call": "FunctionCall",
        "custom_tool_call": "CustomToolCall",
        "function_call_output": "ToolOutput",
        "custom_tool_call_output": "ToolOutput",
        "reasoning": "Reasoning",
        "item_reference": "Reference",
    }.get(type_of(item), "Reference" if _is_named_alone(item) else "Message")


def _is_named_alone(item: object) -> bool:
    """Whether it says nothing but an id."""
    return isinstance(item, dict) and {key for key in item if item[key] is not None} == {"id"}


_Items = (
    Annotated[MessageItem, Tag("Message")]
    | Annotated[FunctionCallItem, Tag("FunctionCall")]
    | Annotated[CustomToolCallItem, Tag("CustomToolCall")]
    | Annotated[ToolOutputItem, Tag("ToolOutput")]
    | Annotated[ReasoningItem, Tag("Reasoning")]
)
ConversationItem = Annotated[_Items, Discriminator(_item_kind)]
"""An item itself."""

_AnyItem = (
    MessageItem
    | FunctionCallItem
    | CustomToolCallItem
    | ToolOutputItem
    | ReasoningItem
    | ItemReference
)
InputItem = Annotated[
    _Items | Annotated[ItemReference, Tag("Reference")],
    Discriminator(_item_kind),
    BeforeValidator(_known, json_schema_input_type=_AnyItem),
]
"""An item, or a reference to one."""
