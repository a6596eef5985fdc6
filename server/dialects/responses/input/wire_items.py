"""Items from clients as they are stored and listed: in OpenAI's full form, each with an id."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from server.dialects.responses.storage.stored import StoredItem
from server.schemas.responses.items import (
    ConversationItem,
    CustomToolCallItem,
    FunctionCallItem,
    MessageItem,
    ReasoningItem,
    SpokenRefusal,
    SpokenText,
    ToolOutputItem,
    UnseenPart,
)

ID_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}

WireItem = dict[str, Any]


def stored_items(items: Iterable[ConversationItem], suffix: str) -> Iterator[StoredItem]:
    """The items, those without an id with one made of the suffix."""
    for index, item in enumerate(items):
        id = item.id or f"{ID_PREFIXES[item.type]}_{suffix}i{index:02x}"
        wire = {"id": id, "type": item.type, "status": "completed", **_fields(item)}
        yield StoredItem(id, json.dumps(wire, ensure_ascii=False).encode())


def _fields(item: ConversationItem) -> WireItem:
    match item:
        case MessageItem():
            kind = "output_text" if item.role == "assistant" else "input_text"
            return {"role": item.role, "content": _parts(item.content, kind)}
        case FunctionCallItem() | CustomToolCallItem():
            return item.model_dump(exclude={"id", "type"}, exclude_none=True)
        case ToolOutputItem():
            return {"call_id": item.call_id, "output": _parts(item.output, "input_text")}
        case ReasoningItem():
            return _reasoning(item)


def _parts(
    parts: Iterable[SpokenText | SpokenRefusal | UnseenPart], text_type: str
) -> list[WireItem]:
    return [_part(part, text_type) for part in parts]


def _part(part: SpokenText | SpokenRefusal | UnseenPart, text_type: str) -> WireItem:
    match part:
        case SpokenText():
            shown = {"type": text_type, "text": part.text}
            return shown | ({"annotations": []} if text_type == "output_text" else {})
        case SpokenRefusal():
            return {"type": "refusal", "refusal": part.refusal}
        case UnseenPart():
            return {"type": part.type}


def _reasoning(item: ReasoningItem) -> WireItem:
    wire: WireItem = {"summary": [_part(part, "summary_text") for part in item.summary]}
    if item.content:
        wire["content"] = [_part(part, "reasoning_text") for part in item.content]
    if item.encrypted_content is not None:
        wire["encrypted_content"] = item.encrypted_content
    return wire
