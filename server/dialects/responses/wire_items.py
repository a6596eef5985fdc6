"""The items of a request as they are stored."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from server.dialects.responses.client_tools import FORM_BY_ITEM
from server.dialects.responses.items import (
    CompactionTriggerItem,
    ConversationItem,
    ImageContent,
    MessageItem,
    ReasoningItem,
    ToolOutputItem,
)
from server.dialects.responses.read import MEDIA_NOTE, Content
from server.dialects.responses.store import StoredItem
from server.record import RequestRecord

ID_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
    "additional_tools": "at",
    "configuration_update": "cu",
    "compaction": "cmp",
    "tool_search_output": "tso",
    "apply_patch_call_output": "apco",
    "shell_call_output": "sho",
    "local_shell_call_output": "lsho",
    **{form.item: form.prefix for form in FORM_BY_ITEM.values()},
}

WireItem = dict[str, Any]


def stored_items(items: Iterable[ConversationItem], record: RequestRecord) -> Iterator[StoredItem]:
    """The items of a request as they are stored. One without an id gets one that ends in that of
    the request. Of its images, the digests are stored. A trigger has done what it is for.
    """
    for index, item in enumerate(items):
        if isinstance(item, CompactionTriggerItem):
            continue
        id = item.id or f"{ID_PREFIXES.get(item.type, 'item')}_{record.id}i{index:02x}"
        wire = {"id": id, "type": item.type, "status": "completed", **_fields(item, record)}
        yield StoredItem(id, json.dumps(wire, ensure_ascii=False).encode())


def _fields(item: ConversationItem, record: RequestRecord) -> WireItem:
    match item:
        case MessageItem():
            text_type = "output_text" if item.role == "assistant" else "input_text"
            return {"role": item.role, "content": _wire_parts(item.content, text_type, record)}
        case ToolOutputItem():
            called = {} if item.call_id is None else {"call_id": item.call_id}
            return {**called, "output": _wire_parts(item.output, "input_text", record)}
        case ReasoningItem():
            content = _wire_parts(item.content, "reasoning_text", record)
            sealed = item.encrypted_content
            return {
                "summary": _wire_parts(item.summary, "summary_text", record),
                **({"content": content} if content else {}),
                **({} if sealed is None else {"encrypted_content": sealed}),
            }
        case _:
            return item.model_dump(exclude={"id", "type"}, exclude_none=True, by_alias=True)


def _wire_parts(parts: Iterable[Content], text_type: str, record: RequestRecord) -> list[WireItem]:
    """The parts as JSON objects: texts with this type, whatever type the client gave them."""
    wire = [
        _wire_image(part, record) if isinstance(part, ImageContent) else part.model_dump()
        for part in parts
    ]
    for part in wire:
        if "text" in part:
            part["type"] = text_type
            if text_type == "output_text":
                part["annotations"] = []
    return wire


def _wire_image(image: ImageContent, record: RequestRecord) -> WireItem:
    """An image by the digest of its bytes. One that the model was not shown is the text in its
    place.
    """
    part = image.part("")
    known = record.images.get((part.source, part.detail))
    if known is None:
        return {"type": "input_text", "text": MEDIA_NOTE}
    return {
        "type": image.type,
        "detail": image.detail,
        "image_url": None,
        "image_digest": known.original.hex(),
    }
