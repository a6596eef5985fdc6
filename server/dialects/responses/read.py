"""The input of a response read into a chat: items, references to stored ones, earlier responses."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from pydantic import TypeAdapter, ValidationError

from server.dialects.responses.answer import unseal
from server.dialects.responses.schema import (
    ConversationItem,
    CustomToolCallItem,
    FunctionCallItem,
    InputTokensRequest,
    ItemReference,
    MessageItem,
    ReasoningItem,
    ResponsesRequest,
    SpokenRefusal,
    SpokenText,
    TextFormat,
    ToolOutputItem,
    UnseenPart,
)
from server.dialects.responses.store import ResponseStore, StoredConversation, StoredItem
from server.dialects.responses.tools import RequestTools, chat_choice, function_name
from server.errors import ApiError, invalid, invalid_field
from server.generation.chat import Chat, Structure
from server.generation.conversation import Conversation
from server.generation.roles import Roles
from server.generation.structure import ANY_OBJECT, of_schema
from server.generation.tools import custom_arguments
from server.json_size import check_json_size

ChatMessage = dict[str, Any]

SYSTEM_ROLES = frozenset({"system", "developer"})
UNSEEN = "(An image or a file stood here. This model reads text alone.)"


def chat_messages(
    instructions: str | None, items: Sequence[ConversationItem], roles: Roles
) -> list[ChatMessage]:
    """The conversation, with one system message at its head, if any.

    It has the instructions and the leading developer messages. Later developer messages stay where
    they are, in the role that the template renders there: at the head they would change the whole
    prompt, and nothing of it would be cached.
    """
    n_leading = next((n for n, item in enumerate(items) if not _is_system(item)), len(items))
    system = [instructions] if instructions else []
    system += [_text(item) for item in items[:n_leading] if isinstance(item, MessageItem)]
    messages = _Messages(roles)
    if system:
        messages.say("system", "\n\n".join(system))
    for item in items[n_leading:]:
        messages.add(item)
    return messages.complete()


@dataclass(slots=True)
class _Answer:
    """An assistant message, put together from the items between two messages of other roles."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    ends_with_message: bool = False

    def message(self) -> ChatMessage:
        message: ChatMessage = {"role": "assistant"}
        if self.content:
            message["content"] = "".join(self.content)
        if self.calls:
            message["tool_calls"] = self.calls
        if self.reasoning:
            message["reasoning_content"] = "".join(self.reasoning)
        return message


class _Messages:
    """Builds messages from items: consecutive items of the model are one assistant message.

    These are reasoning, text and calls in any order and number, but never two texts in a row: those
    are two messages.
    """

    def __init__(self, roles: Roles) -> None:
        self._roles = roles
        self._messages: list[ChatMessage] = []
        self._answer = _Answer()

    def complete(self) -> list[ChatMessage]:
        self._close()
        return self._messages

    def say(self, role: str, content: object) -> None:
        self._close()
        self._messages.append({"role": role, "content": content})

    def add(self, item: ConversationItem) -> None:
        match item:
            case MessageItem(role="assistant"):
                if self._answer.ends_with_message:
                    self._close()
                self._answer.content.append("".join(_texts(item.content)))
            case MessageItem():
                role = self._roles.late_system if _is_system(item) else item.role
                self._hear(role, _parts(_texts(item.content)))
            case ReasoningItem():
                self._answer.reasoning.append(_reasoning(item))
            case FunctionCallItem():
                self._call(item, item.arguments)
            case CustomToolCallItem():
                self._call(item, custom_arguments(item.input))
            case ToolOutputItem():
                self.say("tool", _parts(_texts(item.output)))
                self._messages[-1]["tool_call_id"] = item.call_id
        self._answer.ends_with_message = isinstance(item, MessageItem)

    def _hear(self, role: str, parts: list[dict[str, str]]) -> None:
        """Add a message. Right after a tool result some templates can only render more of it."""
        self._close()
        last = self._messages[-1]["role"] if self._messages else ""
        if (role, last, self._roles.behind_results) == ("user", "tool", "tool"):
            self._messages[-1]["content"] += parts
        else:
            self.say(role, parts)

    def _call(self, item: FunctionCallItem | CustomToolCallItem, arguments: str) -> None:
        name = function_name(item.name, item.namespace)
        self._answer.calls.append(
            {"id": item.call_id, "type": "function",
             "function": {"name": name, "arguments": arguments}}
        )  # fmt: skip

    def _close(self) -> None:
        """End the assistant message. One of reasoning alone, which was cut off, is left out."""
        if self._answer.content or self._answer.calls:
            self._messages.append(self._answer.message())
        self._answer = _Answer()


def _is_system(item: ConversationItem) -> bool:
    return isinstance(item, MessageItem) and item.role in SYSTEM_ROLES


def _text(item: MessageItem) -> str:
    return "\n".join(_texts(item.content))


def _texts(parts: Iterable[SpokenText | SpokenRefusal | UnseenPart]) -> list[str]:
    texts = []
    for part in parts:
        match part:
            case SpokenText():
                texts.append(part.text)
            case SpokenRefusal():
                texts.append(part.refusal)
            case UnseenPart():
                texts.append(UNSEEN)
    return texts


def _parts(texts: Iterable[str]) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def _reasoning(item: ReasoningItem) -> str:
    """The reasoning's text, or else that in `encrypted_content`, or else the summary."""
    if item.content:
        return "".join(part.text for part in item.content)
    sealed = unseal(item.encrypted_content or "")
    return sealed or "".join(part.text for part in item.summary)


Fields = dict[str, Any]


def as_chat(body: ResponsesRequest, prompt: Conversation) -> Chat:
    return Chat(
        conversation=prompt,
        sampling=body,
        max_tokens=body.max_output_tokens,
        logprobs=body.top_logprobs if body.wants_logprobs else None,
        structure=_structure(body.text.format),
        parallel_calls=body.parallel_tool_calls,
        thinking_budget=body.thinking_budget,
    )


def conversation(
    body: InputTokensRequest,
    items: Sequence[ConversationItem],
    tools: RequestTools,
    roles: Roles,
) -> Conversation:
    """What makes the prompt, of which `items` are all. Raises ApiError (400)."""
    fields: Fields = {
        "cache_salt": body.cache_salt,
        "messages": chat_messages(body.instructions, items, roles),
        "tools": tools.functions,
        "tool_choice": chat_choice(body.tool_choice),
        "reasoning_effort": body.reasoning.effort,
        "chat_template_kwargs": body.chat_template_kwargs,
    }
    try:
        return Conversation.model_validate(fields)
    except ValidationError as error:
        raise invalid_field(error) from None


def _structure(format: TextFormat) -> Structure | None:
    if format.type == "text":
        return None
    return "text.format", of_schema(ANY_OBJECT if format.schema_ is None else format.schema_)


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
            return {"role": item.role, "content": _wire_parts(item.content, kind)}
        case FunctionCallItem() | CustomToolCallItem():
            return item.model_dump(exclude={"id", "type"}, exclude_none=True)
        case ToolOutputItem():
            return {"call_id": item.call_id, "output": _wire_parts(item.output, "input_text")}
        case ReasoningItem():
            return _wire_reasoning(item)


def _wire_parts(
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


def _wire_reasoning(item: ReasoningItem) -> WireItem:
    wire: WireItem = {"summary": [_part(part, "summary_text") for part in item.summary]}
    if item.content:
        wire["content"] = [_part(part, "reasoning_text") for part in item.content]
    if item.encrypted_content is not None:
        wire["encrypted_content"] = item.encrypted_content
    return wire


_ITEMS = TypeAdapter(list[ConversationItem])


@dataclass(frozen=True, slots=True)
class ResolvedInput:
    """A request's conversation, each reference replaced by what it refers to."""

    before: StoredConversation | None  # the previous response with all before it, as stored ...
    earlier: Sequence[ConversationItem]  # ... and its items
    items: Sequence[ConversationItem]  # the request's own


def referenced_bytes(body: InputTokensRequest, store: ResponseStore, owner: str) -> int:
    """About how many bytes of stored items the body refers to."""
    previous = store.get(owner, body.previous_response_id or "")
    before = previous.conversation.total_bytes if previous else 0
    times = Counter(reference.id for _, reference in _references(body))
    return before + sum(n * store.item_bytes(owner, id) for id, n in times.items())


def resolved_input(
    body: InputTokensRequest, store: ResponseStore, owner: str, max_bytes: int
) -> ResolvedInput:
    """Raises ApiError (400) for references to what is not stored, and for more than `max_bytes`: a
    short body can refer to long items, and to each of them often.
    """
    before = _previous(body.previous_response_id, store, owner)
    stored = list(before or ())
    referenced = _referenced(body, store, owner)
    _check_length([*stored, *referenced], max_bytes, "previous_response_id" if stored else "input")
    parsed = iter(_ITEMS.validate_json(_json([*stored, *referenced])))
    earlier = list(islice(parsed, len(stored)))
    items = [next(parsed) if isinstance(item, ItemReference) else item for item in body.input]
    return ResolvedInput(before, earlier, items)


def _previous(id: str | None, store: ResponseStore, owner: str) -> StoredConversation | None:
    if id is None:
        return None
    previous = store.get(owner, id)
    if previous is None:
        raise ApiError(
            400,
            f"Previous response with id '{id}' not found.",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return previous.conversation


def _referenced(body: InputTokensRequest, store: ResponseStore, owner: str) -> list[StoredItem]:
    """The items that the references refer to, in their order."""
    stored = store.items(owner, (reference.id for _, reference in _references(body)))
    for index, reference in _references(body):
        if reference.id not in stored:
            message = f"input[{index}].id: Item with id '{reference.id}' not found."
            raise invalid(message, f"input[{index}].id")
    return [stored[reference.id] for _, reference in _references(body)]


def _references(body: InputTokensRequest) -> Iterator[tuple[int, ItemReference]]:
    """Each with its index in the input."""
    for index, item in enumerate(body.input):
        if isinstance(item, ItemReference):
            yield index, item


def _check_length(stored: Sequence[StoredItem], max_bytes: int, param: str) -> None:
    if sum(len(item.json) for item in stored) > max_bytes:
        limit = f"at most {max_bytes} bytes (max_body_bytes)"
        raise invalid(f"{param}: the items that it stands for are too long: {limit}", param)
    try:
        check_json_size(_json(stored))
    except ValueError as error:
        raise invalid(f"{param}: what it stands for {error}", param) from None


def _json(stored: Sequence[StoredItem]) -> bytes:
    return b"[" + b",".join(item.json for item in stored) + b"]"
