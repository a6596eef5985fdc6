"""A Messages body read into a chat."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby
from typing import Any

from pydantic import BaseModel, ValidationError

from server.dialects.messages.blocks import (
    BlockParam,
    CompactionBlockParam,
    DocumentBlockParam,
    ForeignBlock,
    ImageBlockParam,
    MessageParam,
    RedactedThinkingBlockParam,
    SearchResultBlockParam,
    TextBlockParam,
    ThinkingBlockParam,
    ToolReferenceBlockParam,
    ToolResultBlockParam,
    ToolUseBlockParam,
)
from server.dialects.messages.schema import (
    CountTokensRequest,
    MessagesRequest,
    ToolChoiceParam,
    ToolParam,
)
from server.errors import InvalidField
from server.generation.compaction import stands_for
from server.generation.conversation import (
    Chat,
    Conversation,
    Message,
    Part,
    Role,
    Text,
    check_continued,
    check_messages,
    check_tools,
    texts,
)
from server.generation.foreign_history import foreign_note, joined, log_dropped, log_foreign
from server.generation.request_fields import SampledRequest
from server.generation.requests import ServedModel
from server.generation.seals import Seals
from server.generation.tools import (
    Tool,
    ToolCall,
    ToolChoice,
    ToolMode,
    function_tool,
)
from server.record import RequestRecord

SPOKEN = (TextBlockParam, ImageBlockParam, DocumentBlockParam, SearchResultBlockParam)
FOREIGN = (ForeignBlock, CompactionBlockParam)

BLOCKS_OF: dict[str, tuple[type[BaseModel], ...]] = {
    "system": (TextBlockParam, *FOREIGN),
    "user": (*SPOKEN, ToolResultBlockParam, *FOREIGN),
    "assistant": (
        *FOREIGN,
        TextBlockParam,
        ThinkingBlockParam,
        RedactedThinkingBlockParam,
        ToolUseBlockParam,
    ),
}


def chat_messages(
    system: Iterable[str],
    messages: Sequence[MessageParam],
    seals: Seals,
    tools: Iterable[Tool] = (),
) -> list[Message]:
    """The conversation, each turn one message and each tool's result one of its own, which makes
    those of the tools known that it refers to. So does a system message in the place of a block
    that refers to tools or defines them. A summary takes the place of all that is before it but
    `system`.

    Raises ApiError (400) for blocks that are not of their role, and for a summary that is not as
    this server has signed it.
    """
    turns = _turns(system, messages, seals, {tool.name: tool for tool in tools})
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
        parts = [*texts(joined(part.text for part in parts if isinstance(part, Text)))]
    reasoning = "".join(message.reasoning for message in messages)
    calls = [call for message in messages for call in message.calls]
    tools = [tool for message in messages for tool in message.tools]
    return [Message(role=role, parts=parts, reasoning=reasoning, calls=calls, tools=tools)]


def _turns(
    system: Iterable[str],
    messages: Sequence[MessageParam],
    seals: Seals,
    tools: Mapping[str, Tool],
) -> list[Message]:
    first, known = texts(*system), dict(tools)
    turns = [Message(role="system", parts=first)] if first else []
    for index, message in enumerate(messages):
        place = f"messages[{index}].content"
        _check_blocks(message, place)
        is_silent = not message.content or message.role != "assistant"
        for at, block in enumerate(message.content):
            said = list(_said(message.role, block, known, f"{place}[{at}]"))
            turns += said
            is_silent = is_silent and not said
            if isinstance(block, CompactionBlockParam) and block.content:
                seals.check(block.content, block.signature, f"{place}[{at}]")
                turns, is_silent = stands_for(turns, block.content), False
        if is_silent:
            turns.append(Message(role=message.role))
    return turns


def _said(role: Role, block: BlockParam, tools: dict[str, Tool], place: str) -> Iterator[Message]:
    """What a block says that is in this place. Tools that it defines are added to `tools`."""
    match block:
        case TextBlockParam() | DocumentBlockParam() | SearchResultBlockParam():
            yield Message(role=role, parts=texts(block.text))
        case ImageBlockParam():
            yield Message(role=role, parts=[block.part(place)])
        case ToolResultBlockParam():
            yield _result(block, tools, place)
        case ThinkingBlockParam():
            yield Message(role=role, reasoning=block.thinking)
        case ToolUseBlockParam():
            arguments = json.dumps(block.input, ensure_ascii=False)
            yield Message(role=role, calls=[ToolCall(block.id, block.name, arguments)])
        case CompactionBlockParam():
            yield from _made_known(block.tool_changes, tools)
        case ForeignBlock(type="tool_addition" | "tool_search_tool_result"):
            yield from _made_known([block.model_dump()], tools)
        case ForeignBlock():
            if (note := foreign_note(block.type, block.model_dump())) is not None:
                yield Message(role=role, parts=texts(note))


def _made_known(changes: Iterable[object], tools: dict[str, Tool]) -> Iterator[Message]:
    """The message that makes tools known which `tool_addition` blocks and the results of
    Anthropic's own search have. Definitions are added to `tools`.
    """
    found, undeclared = list[Tool](), list[str]()
    for each in chain.from_iterable(map(_tool_changes, changes)):
        match each:
            case {"type": "tool_definition", "definition": dict(definition)}:
                for tool in _defined(definition):
                    found.append(tools.setdefault(tool.name, tool))
            case {"tool_name": str(name)} | {"type": "tool_reference", "name": str(name)}:
                if name in tools:
                    found.append(tools[name])
                else:
                    undeclared.append(name)
    if found or undeclared:
        yield Message(role="system", tools=found, undeclared_tools=undeclared)


def _tool_changes(change: object) -> Sequence[object]:
    match change:
        case {"type": "tool_addition", "tool": tool}:
            return [tool]
        case {"content": {"tool_references": list(references)}}:
            return references
        case _:
            return []


def _defined(definition: Mapping[str, object]) -> Sequence[Tool]:
    try:
        return _tools([ToolParam.model_validate(definition)])
    except ValidationError:
        return []


def _result(block: ToolResultBlockParam, tools: Mapping[str, Tool], place: str) -> Message:
    names = [each.tool_name for each in block.content if isinstance(each, ToolReferenceBlockParam)]
    content = f"{place}.tool_result.content"
    parts, said = list[Part](), list[str]()
    for at, each in enumerate(block.content):
        if isinstance(each, ImageBlockParam):
            parts += [*_joined_texts(said), each.part(f"{content}[{at}]")]
            said = []
        else:
            said += block_texts([each])
    parts += _joined_texts(said)
    return Message(
        role="tool",
        parts=_as_error(parts) if block.is_error else parts or texts(""),
        answered_call=block.tool_use_id,
        tools=[tools[name] for name in names if name in tools],
        undeclared_tools=[name for name in names if name not in tools],
    )


def _joined_texts(said: Sequence[str]) -> tuple[Part, ...]:
    """The texts as one part; none where there are none."""
    return texts("\n".join(said)) if said else ()


def _as_error(parts: Sequence[Part]) -> list[Part]:
    """What a tool returned, marked as an error."""
    match parts:
        case [Text(text), *rest]:
            return [Text(f"Error: {text}"), *rest]
        case _:
            return [Text("Error: "), *parts]


def block_texts(blocks: Iterable[BaseModel]) -> list[str]:
    """The texts of the blocks that have one, of documents and foreign blocks too."""
    found = list[str]()
    for block in blocks:
        match block:
            case TextBlockParam() | DocumentBlockParam() | SearchResultBlockParam():
                found.append(block.text)
            case ForeignBlock():
                note = foreign_note(block.type, block.model_dump())
                found += [] if note is None else [note]
    return found


def _foreign_kinds(messages: Iterable[MessageParam]) -> Counter[str]:
    """The number of foreign blocks by their types."""
    blocks = [block for message in messages for block in message.content]
    results = [block for block in blocks if isinstance(block, ToolResultBlockParam)]
    inner = chain.from_iterable(result.content for result in results)
    return Counter(each.type for each in (*blocks, *inner) if isinstance(each, ForeignBlock))


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

Fields = dict[str, Any]


def as_chat(body: MessagesRequest, model: ServedModel, record: RequestRecord, seals: Seals) -> Chat:
    """Notes the body's `cache_control` fields in the record. Raises ApiError (400)."""
    record.cache_marks = body.cache_control_count
    log_dropped(Counter(tool.type for tool in body.tools if tool.is_hosted), record.id)
    log_foreign(_foreign_kinds(body.messages), record.id)
    choice = body.tool_choice
    return Chat(
        conversation=conversation(body, model, seals),
        sampling=_sampling(body),
        max_tokens=body.max_tokens or None,  # with 0 the answer is left out
        structure=body.structure,
        parallel_calls=choice is None or not choice.disable_parallel_tool_use,
        thinking_budget=body.thinking_choice.budget_of(reasons=model.planner.reasons),
    )


def conversation(body: CountTokensRequest, model: ServedModel, seals: Seals) -> Conversation:
    """The conversation that makes the prompt. Raises ApiError (400)."""
    system = block_texts(body.system)
    if model.settings.strip_billing_header:
        system = [_without_billing_line(text) for text in system]
    tools = _tools(body.tools)
    check_tools(tools, "tools")
    messages = chat_messages(filter(None, system), body.messages, seals, tools)
    check_messages(messages, "messages")
    is_continued = messages[-1].role == "assistant"
    if is_continued:
        check_continued(messages, "messages")
    return Conversation(
        messages=messages,
        tools=tools,
        tool_choice=_choice(body),
        continue_final_message=is_continued,
        cache_salt=body.cache_salt,
        **body.thinking_choice.conversation_fields,
    )


def _without_billing_line(text: str) -> str:
    """Claude Code begins its system prompt with a line that differs from session to session."""
    line, _, rest = text.partition("\n")
    return rest if line.startswith(BILLING_LINE) else text


def _tools(tools: Sequence[ToolParam]) -> list[Tool]:
    runs_search = any(tool.is_hosted and tool.type.startswith(SEARCHES) for tool in tools)
    return [
        _function(tool, is_deferred=tool.defer_loading and not runs_search)
        for tool in tools
        if not tool.is_hosted
    ]


def _function(tool: ToolParam, *, is_deferred: bool) -> Tool:
    known = tool.client_tool
    return function_tool(
        tool.function_name,
        known.description if known else tool.description,
        known.parameters if known else tool.input_schema,
        strict=tool.strict,
        is_deferred=is_deferred,
    )


def _choice(body: CountTokensRequest) -> ToolChoice:
    choice = body.tool_choice
    match choice:
        case None:
            return ToolChoice()
        case _ if body.chooses_dropped:
            return ToolChoice()
        case ToolChoiceParam(type="tool", name=name):
            return ToolChoice("required", frozenset({name}))
        case _:
            return ToolChoice(MODES[choice.type])


def _sampling(body: MessagesRequest) -> SampledRequest:
    return body.model_copy(update={"stop": body.stop_sequences}) if body.stop_sequences else body
