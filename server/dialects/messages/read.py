"""A Messages body read into a chat."""

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from pydantic import BaseModel

from server.dialects.messages.schema import (
    CountTokensRequest,
    DocumentBlockParam,
    MessageParam,
    MessagesRequest,
    RedactedThinkingBlockParam,
    SearchResultBlockParam,
    TextBlockParam,
    ThinkingBlockParam,
    ToolChoiceParam,
    ToolParam,
    ToolReferenceBlockParam,
    ToolResultBlockParam,
    ToolUseBlockParam,
)
from server.errors import InvalidField
from server.generation.conversation import (
    Chat,
    Conversation,
    Message,
    Role,
    check_continued,
    check_messages,
    check_tools,
    texts,
)
from server.generation.request_fields import SampledRequest
from server.generation.requests import ServedModel
from server.generation.tools import (
    Tool,
    ToolCall,
    ToolChoice,
    ToolMode,
    function_tool,
)
from server.record import RequestRecord

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


def chat_messages(
    system: Iterable[str], messages: Sequence[MessageParam], tools: Iterable[Tool] = ()
) -> list[Message]:
    """The conversation, each turn one message and each tool's result one of its own, which makes
    those of the tools known that it refers to.

    Raises ApiError (400) for blocks that are not of their role.
    """
    turns = _turns(system, messages, {tool.name: tool for tool in tools})
    grouped = groupby(turns, lambda message: message.role)
    return [message for role, turns in grouped for message in _merged(role, [*turns])]


def _merged(role: Role, messages: Sequence[Message]) -> Sequence[Message]:
    """Consecutive messages of one role as one, but for results. An assistant's texts are
    concatenated.
    """
    if role == "tool":
        return messages
    parts = [part for message in messages for part in message.parts]
    if role == "assistant" and parts:
        parts = [*texts("".join(part.text for part in parts))]
    reasoning = "".join(message.reasoning for message in messages)
    calls = [call for message in messages for call in message.calls]
    return [Message(role=role, parts=parts, reasoning=reasoning, calls=calls)]


def _turns(
    system: Iterable[str], messages: Sequence[MessageParam], tools: Mapping[str, Tool]
) -> Iterator[Message]:
    if first := texts(*system):
        yield Message(role="system", parts=first)
    for index, message in enumerate(messages):
        _check_blocks(message, f"messages[{index}].content")
        match message.role:
            case "user":
                yield from _users(message, tools)
            case "assistant":
                yield _assistants(message)
            case "system":
                yield Message(role="system", parts=texts(*block_texts(message.content)))


def _users(message: MessageParam, tools: Mapping[str, Tool]) -> Iterator[Message]:
    """The tool results of a user message, and its texts between and after them."""
    if not message.content:
        yield Message(role="user")
    for block in message.content:
        match block:
            case TextBlockParam() | DocumentBlockParam() | SearchResultBlockParam():
                yield Message(role="user", parts=texts(block.text))
            case ToolResultBlockParam():
                yield _result(block, tools)


def _result(block: ToolResultBlockParam, tools: Mapping[str, Tool]) -> Message:
    names = [each.tool_name for each in block.content if isinstance(each, ToolReferenceBlockParam)]
    unknown = [f"There is no tool {name}." for name in names if name not in tools]
    text = "\n".join([*block_texts(block.content), *unknown])
    return Message(
        role="tool",
        parts=texts(f"Error: {text}" if block.is_error else text),
        answered_call=block.tool_use_id,
        tools=[tools[name] for name in names if name in tools],
    )


def _assistants(message: MessageParam) -> Message:
    said, thoughts, calls = list[str](), list[str](), list[ToolCall]()
    for block in message.content:
        match block:
            case TextBlockParam():
                said.append(block.text)
            case ThinkingBlockParam():
                thoughts.append(block.thinking)
            case ToolUseBlockParam():
                arguments = json.dumps(block.input, ensure_ascii=False)
                calls.append(ToolCall(block.id, block.name, arguments))
    return Message(role="assistant", parts=texts(*said), reasoning="".join(thoughts), calls=calls)


def block_texts(blocks: Iterable[BaseModel]) -> list[str]:
    """The texts of the blocks that have one, of documents too."""
    return [block.text for block in blocks if isinstance(block, SPOKEN)]


def _check_blocks(message: MessageParam, place: str) -> None:
    """Raise ApiError (400) for a block that a message of this role cannot have."""
    for index, block in enumerate(message.content):
        if not isinstance(block, BLOCKS_OF[message.role]):
            text = f"a message of role '{message.role}' has no {block.type} blocks"
            raise InvalidField(f"{place}[{index}]", text)


BILLING_LINE = "x-anthropic-billing-header:"
MODES: Mapping[str, ToolMode] = {"auto": "auto", "any": "required", "none": "none"}

SEARCHES = "tool_search_tool_"
"""How the types of Anthropic's own searches begin. Without them nothing would find deferred tools.
"""

MAX_LOGGED = 8  # types of tools, which are client input

log = logging.getLogger("rootstock.messages")

Fields = dict[str, Any]


def as_chat(body: MessagesRequest, model: ServedModel, record: RequestRecord) -> Chat:
    """Notes the body's `cache_control` fields in the record. Raises ApiError (400)."""
    record.cache_marks = body.cache_control_count
    choice = body.tool_choice
    return Chat(
        conversation=conversation(body, model),
        sampling=_sampling(body),
        max_tokens=body.max_tokens or None,  # with 0 the answer is left out
        structure=body.structure,
        parallel_calls=choice is None or not choice.disable_parallel_tool_use,
        thinking_budget=body.thinking_choice.budget_of(reasons=model.planner.reasons),
    )


def conversation(body: CountTokensRequest, model: ServedModel) -> Conversation:
    """The conversation that makes the prompt. Raises ApiError (400)."""
    system = block_texts(body.system)
    if model.settings.strip_billing_header:
        system = [_without_billing_line(text) for text in system]
    tools = _tools(body.tools)
    check_tools(tools, "tools")
    messages = chat_messages(filter(None, system), body.messages, tools)
    check_messages(messages, "messages")
    is_continued = messages[-1].role == "assistant"
    if is_continued:
        check_continued(messages, "messages")
    return Conversation(
        messages=messages,
        tools=tools,
        tool_choice=_choice(body.tool_choice),
        continue_final_message=is_continued,
        cache_salt=body.cache_salt,
        **body.thinking_choice.conversation_fields,
    )


def _without_billing_line(text: str) -> str:
    """Claude Code begins its system prompt with a line that differs from session to session."""
    line, _, rest = text.partition("\n")
    return rest if line.startswith(BILLING_LINE) else text


def _tools(tools: Sequence[ToolParam]) -> list[Tool]:
    if kinds := sorted({tool.type for tool in tools if tool.is_hosted}):
        log.info("left out, as they run at Anthropic alone: tools of types %r", kinds[:MAX_LOGGED])
    runs_search = any(tool.is_hosted and tool.type.startswith(SEARCHES) for tool in tools)
    return [
        function_tool(
            tool.name,
            tool.description,
            tool.input_schema,
            strict=tool.strict,
            is_deferred=tool.defer_loading and not runs_search,
        )
        for tool in tools
        if not tool.is_hosted
    ]


def _choice(choice: ToolChoiceParam | None) -> ToolChoice:
    match choice:
        case None:
            return ToolChoice()
        case ToolChoiceParam(type="tool", name=name):
            return ToolChoice("required", frozenset({name}))
        case _:
            return ToolChoice(MODES[choice.type])


def _sampling(body: MessagesRequest) -> SampledRequest:
    return body.model_copy(update={"stop": body.stop_sequences}) if body.stop_sequences else body
