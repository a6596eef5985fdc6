"""A Messages body read into a chat."""

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
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
    ThinkingParam,
    ToolChoiceParam,
    ToolParam,
    ToolResultBlockParam,
    ToolUseBlockParam,
)
from server.errors import InvalidField
from server.generation.conversation import Chat, Conversation
from server.generation.prompt import ChatMessage, Turn
from server.generation.request_fields import SampledRequest, Structure, of_schema
from server.generation.requests import ServedModel
from server.generation.tools import MAX_TOOLS
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


def chat_messages(system: Iterable[str], messages: Sequence[MessageParam]) -> list[ChatMessage]:
    """The conversation, each turn one message and each tool's result one of its own.

    Raises ApiError (400) for blocks that are not of their role.
    """
    turns: list[Turn] = []
    for turn in _turns(system, messages):
        if turns and turns[-1].role == turn.role != "tool":
            turns[-1].add(turn)
        else:
            turns.append(turn)
    for turn in turns:
        if len(turn.calls) > MAX_TOOLS:
            raise InvalidField("messages", f"at most {MAX_TOOLS} tool_use blocks in one turn")
    return [turn.message() for turn in turns]


def _turns(system: Iterable[str], messages: Sequence[MessageParam]) -> Iterator[Turn]:
    if texts := list(system):
        yield Turn("system", texts)
    for index, message in enumerate(messages):
        _check_blocks(message, f"messages[{index}].content")
        match message.role:
            case "user":
                yield from _users(message)
            case "assistant":
                yield _assistants(message)
            case "system":
                yield Turn("system", block_texts(message.content))


def _users(message: MessageParam) -> Iterator[Turn]:
    """The tool results of a user message, and its texts between and after them."""
    if not message.content:
        yield Turn("user")
    for block in message.content:
        match block:
            case TextBlockParam() | DocumentBlockParam() | SearchResultBlockParam():
                yield Turn("user", [block.text])
            case ToolResultBlockParam():
                text = "\n".join(block_texts(block.content))
                result = f"Error: {text}" if block.is_error else text
                yield Turn("tool", [result], answered_call=block.tool_use_id)


def _assistants(message: MessageParam) -> Turn:
    turn = Turn("assistant")
    for block in message.content:
        match block:
            case TextBlockParam():
                turn.texts.append(block.text)
            case ThinkingBlockParam():
                turn.thoughts.append(block.thinking)
            case ToolUseBlockParam():
                turn.add_call(block.id, block.name, json.dumps(block.input, ensure_ascii=False))
    return turn


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
TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}

SAME = {
    *("model", "stream", "temperature", "top_p", "top_k"),
    *("cache_salt", "seed", "priority", "speculate"),
}
"""Fields with the same name in a SampledRequest."""

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
        structure=_structure(body),
        parallel_calls=choice is None or not choice.disable_parallel_tool_use,
        thinking_budget=_budget(body.thinking) if model.planner.reasons else None,
    )


def conversation(body: CountTokensRequest, model: ServedModel) -> Conversation:
    """The conversation that makes the prompt. Raises ApiError (400)."""
    system = block_texts(body.system)
    if model.settings.strip_billing_header:
        system = [_without_billing_line(text) for text in system]
    messages = chat_messages(filter(None, system), body.messages)
    return Conversation.read(
        cache_salt=body.cache_salt,
        messages=messages,
        continue_final_message=messages[-1]["role"] == "assistant",
        **_tools(body.tools),
        **_choice(body.tool_choice),
        **_reasoning(body, reasons=model.planner.reasons),
    )


def _without_billing_line(text: str) -> str:
    """Claude Code begins its system prompt with a line that differs from session to session."""
    line, _, rest = text.partition("\n")
    return rest if line.startswith(BILLING_LINE) else text


def _tools(tools: Sequence[ToolParam]) -> Fields:
    if kinds := sorted({tool.type for tool in tools if tool.is_hosted}):
        log.info("left out, as they run at Anthropic alone: tools of types %r", kinds[:MAX_LOGGED])
    return {"tools": [_function(tool) for tool in tools if not tool.is_hosted]}


def _function(tool: ToolParam) -> Fields:
    declared: Fields = {"name": tool.name, "description": tool.description}
    declared |= {"parameters": tool.input_schema, "strict": tool.strict}
    return {"type": "function", "function": declared}


def _choice(choice: ToolChoiceParam | None) -> Fields:
    if choice is None:
        return {}
    named = {"type": "function", "function": {"name": choice.name}}
    return {"tool_choice": TOOL_CHOICES.get(choice.type, named)}


def _reasoning(body: CountTokensRequest, *, reasons: bool) -> Fields:
    """The template's fields of reasoning. `thinking` is ignored for a model without reasoning:
    clients send it to all models.
    """
    effort = body.output_config.effort
    fields: Fields = {"reasoning_effort": effort}
    template: Fields = {}
    match body.thinking:
        case ThinkingParam(type="enabled") if reasons:
            template["enable_thinking"] = True
        case ThinkingParam(type="disabled") if reasons:
            template["enable_thinking"] = False
    return fields | {"chat_template_kwargs": template | body.chat_template_kwargs}


def _budget(thinking: ThinkingParam | None) -> int | None:
    match thinking:
        case ThinkingParam(type="enabled", budget_tokens=budget):
            return budget
        case _:
            return None


def _sampling(body: MessagesRequest) -> SampledRequest:
    fields: Fields = body.model_dump(include=SAME, exclude_none=True)
    return SampledRequest(stop=body.stop_sequences, **fields)


def _structure(body: MessagesRequest) -> Structure | None:
    format = body.output_config.format or body.output_format
    return None if format is None else ("output_config.format", of_schema(format.schema_))
