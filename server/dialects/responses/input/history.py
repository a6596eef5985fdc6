"""The items of a conversation as chat messages."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from server.dialects.responses.sealed import unseal
from server.dialects.responses.tools import function_name
from server.generation.roles import Roles
from server.schemas.custom_tools import custom_arguments
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
