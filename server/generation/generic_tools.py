"""Tools in conversations for chat templates that have none: the `generic` format.

The system turn describes the tools and how they are called. Calls are text of the assistant, in the
form that the format's parser reads, and their results are text of the user.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

TemplateMessage = Mapping[str, Any]
"""A message as a chat template takes it. Its content is one string."""

_HEAD = "You have access to the following tools:\n<tools>\n"
_TAIL = """
</tools>

The output MUST strictly adhere to the following format, with the name and the arguments of one of \
the tools, and NO other text MUST be included:
<tool_call>
{"name": "tool_name", "arguments": {"argument": "value"}}
</tool_call>
If no tool fits, answer in plain text."""
"""After SmolLM2's own prompt for function calls. docs/api/chat.md has how often it calls."""


def tools_text(tools: Sequence[Mapping[str, Any]]) -> str:
    """The description of the tools: each one's declaration as a line of JSON."""
    return _HEAD + "\n".join(map(_json, tools)) + _TAIL


def call_text(name: str, arguments: object) -> str:
    """A call as models write it. Arguments that are no JSON are given as the text that they are."""
    written = arguments if isinstance(arguments, str) else _json(arguments)
    return f'<tool_call>\n{{"name": {_json(name)}, "arguments": {written}}}\n</tool_call>'


_RESULT_MARKER = re.compile(r"<(\\*/?tool_response>)")


def result_text(content: str) -> str:
    """A tool's result."""
    return f"<tool_response>\n{quoted(content)}\n</tool_response>"


def quoted(text: str) -> str:
    """Text of a user or a tool, which can neither begin nor end a result: a marker of results that
    it spells, or one that has backslashes already, gets a backslash after its first character.
    """
    return _RESULT_MARKER.sub(r"<\\\1", text)


SystemRole: TypeAlias = Literal["system", "user"]


@dataclass(frozen=True, slots=True)
class PlainConversation:
    """A conversation in the roles that every template has. `places` has, for each of the original
    messages, the index of the message that it is in.
    """

    messages: Sequence[TemplateMessage]
    places: Sequence[int]


def plain_conversation(
    messages: Sequence[TemplateMessage],
    tools: Sequence[Mapping[str, Any]],
    system_role: SystemRole,
) -> PlainConversation:
    """The conversation with its tools, calls and results as text.

    The description of the tools begins the system turn, so that conversations with other
    instructions share it in the prefix cache. Where the template renders no system turn, the user's
    turn begins with it. Results in a row are one turn of the user, and so is what the user says
    right after them: templates may insist on turns that alternate.
    """
    joined = {("system", "system"): "\n\n", ("tool", "tool"): "\n", ("tool", "user"): "\n"}
    if system_role == "user":
        joined["system", "user"] = "\n\n"
    turns: list[tuple[TemplateMessage, list[str]]] = []
    places: list[int] = []
    last = ""
    if tools:
        turns.append(({"role": system_role}, [tools_text(tools)]))
        last = "system"
    for message in messages:
        role = message["role"]
        if (separator := joined.get((last, role))) is not None:
            turns[-1][1].extend((separator, _text(message)))
        else:
            turns.append((_fields(message, system_role), [_text(message)]))
        places.append(len(turns) - 1)
        last = role
    plain = [{**fields, "content": "".join(texts)} for fields, texts in turns]
    return PlainConversation(plain, places)


def _text(message: TemplateMessage) -> str:
    """The message's content, with its calls."""
    content: str = message["content"]
    match message["role"]:
        case "tool":
            return result_text(content)
        case "user":
            return quoted(content)
    calls = [call["function"] for call in message.get("tool_calls", ())]
    written = [call_text(call["name"], call["arguments"]) for call in calls]
    return "\n".join([*filter(None, [content]), *written]) if written else content


def _fields(message: TemplateMessage, system_role: SystemRole) -> TemplateMessage:
    """The message's other fields, in a role that the template has."""
    roles = {"tool": "user", "system": system_role}
    dropped = {"content", "tool_calls", "tool_call_id"}
    if message["role"] == "tool":
        dropped.add("name")
    fields = {key: value for key, value in message.items() if key not in dropped}
    return {**fields, "role": roles.get(message["role"], message["role"])}


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
