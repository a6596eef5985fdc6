"""Anthropic's messages as chat messages."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pydantic import BaseModel

from server.errors import invalid
from server.generation.roles import Roles
from server.schemas.chat import Message, TextPart
from server.schemas.messages.content import (
    DocumentBlockParam,
    MessageParam,
    RedactedThinkingBlockParam,
    SearchResultBlockParam,
    TextBlockParam,
    ThinkingBlockParam,
    ToolResultBlockParam,
    ToolUseBlockParam,
)
from server.schemas.tools import MAX_TOOLS, CustomToolCall, FunctionCall, FunctionToolCall

SPOKEN = (TextBlockParam, DocumentBlockParam, SearchResultBlockParam)

BLOCKS_OF: dict[str, tuple[type[BaseModel], ...]] = {
    "system": (TextBlockParam,),
    "user": (*SPOKEN, ToolResultBlockParam),
    "assistant": (
        TextBlockParam,
        ThinkingBlockParam,
        RedactedThinkingBlockParam,
        ToolUseBlockParam,
    ),
}


@dataclass(slots=True)
class _Turn:
    """Consecutive messages of one role: one message to Anthropic and to many templates."""

    role: Literal["system", "user", "assistant", "tool"]
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[FunctionToolCall | CustomToolCall] = field(default_factory=list)
    answers: str | None = None  # the id of the tool call that it answers

    def takes(self, other: "_Turn", roles: Roles) -> bool:
        """Whether the next turn is joined to this one."""
        if self.role == "tool":
            return other.role == "user" and roles.behind_results == "tool"
        return self.role == other.role

    def add(self, other: "_Turn") -> None:
        self.texts += other.texts
        self.thoughts += other.thoughts
        self.calls += other.calls

    def message(self) -> Message:
        """As one message. An assistant's texts are concatenated, others joined by line breaks."""
        text = ("" if self.role == "assistant" else "\n").join(self.texts)
        is_empty = self.role == "assistant" and not self.texts
        return Message(
            role=self.role,
            content=None if is_empty else [TextPart(type="text", text=text)],
            reasoning_content="".join(self.thoughts) or None,
            tool_calls=self.calls or None,
            tool_call_id=self.answers,
        )


def chat_messages(
    system: Iterable[str], messages: Sequence[MessageParam], roles: Roles
) -> list[Message]:
    """The conversation, each turn one message and each tool's result one of its own.

    Raises ApiError (400) for blocks that are not of their role.
    """
    turns: list[_Turn] = []
    for turn in _turns(system, messages, roles):
        if turns and turns[-1].takes(turn, roles):
            turns[-1].add(turn)
        else:
            turns.append(turn)
    for turn in turns:
        if len(turn.calls) > MAX_TOOLS:
            message = f"messages: at most {MAX_TOOLS} tool_use blocks in one turn"
            raise invalid(message, "messages")
    return [turn.message() for turn in turns]


def _turns(
    system: Iterable[str], messages: Sequence[MessageParam], roles: Roles
) -> Iterator[_Turn]:
    if texts := list(system):
        yield _Turn("system", texts)
    has_begun = False
    for index, message in enumerate(messages):
        _check_blocks(message, f"messages[{index}].content")
        has_begun = has_begun or message.role != "system"
        match message.role:
            case "user":
                yield from _users(message)
            case "assistant":
                yield _assistants(message)
            case "system" if has_begun and roles.late_system == "user":
                reminder = "\n".join(block_texts(message.content))
                yield _Turn("user", [f"<system-reminder>\n{reminder}\n</system-reminder>"])
            case "system":
                yield _Turn("system", block_texts(message.content))


def _users(message: MessageParam) -> Iterator[_Turn]:
    """The tool results of a user message, and its texts between and after them."""
    if not message.content:
        yield _Turn("user")
    for block in message.content:
        match block:
            case TextBlockParam() | DocumentBlockParam() | SearchResultBlockParam():
                yield _Turn("user", [block.text])
            case ToolResultBlockParam():
                text = "\n".join(block_texts(block.content))
                result = f"Error: {text}" if block.is_error else text
                yield _Turn("tool", [result], answers=block.tool_use_id)


def _assistants(message: MessageParam) -> _Turn:
    turn = _Turn("assistant")
    for block in message.content:
        match block:
            case TextBlockParam():
                turn.texts.append(block.text)
            case ThinkingBlockParam():
                turn.thoughts.append(block.thinking)
            case ToolUseBlockParam():
                arguments = json.dumps(block.input, ensure_ascii=False)
                function = FunctionCall(name=block.name, arguments=arguments)
                turn.calls.append(FunctionToolCall(id=block.id, function=function))
    return turn


def block_texts(blocks: Iterable[BaseModel]) -> list[str]:
    """The texts of the blocks that have one, of documents too."""
    return [block.text for block in blocks if isinstance(block, SPOKEN)]


def _check_blocks(message: MessageParam, place: str) -> None:
    """Raise ApiError (400) for a block that a message of this role cannot have."""
    for index, block in enumerate(message.content):
        if not isinstance(block, BLOCKS_OF[message.role]):
            where = f"{place}[{index}]"
            text = f"{where}: a message of role '{message.role}' has no {block.type} blocks"
            raise invalid(text, where)
