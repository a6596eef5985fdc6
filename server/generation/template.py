"""A conversation as the messages of the model's chat template."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from engine.values.model import Tokenizer
from server.generation.conversation import Message, Part, texts
from server.generation.generic_tools import SystemRole

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""The names that templates use: most the first, gpt-oss's the last."""

WriteArguments = Callable[[str], object]
"""Makes a call's arguments, given as JSON text, into the template's value."""


def as_object(arguments: str) -> object:
    """An object, as most templates expect; text that is none stays as it is."""
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def as_text(arguments: str) -> object:
    """Text, as DeepSeek's templates expect, which concatenate it."""
    return arguments or "{}"


def template_messages(
    messages: Sequence[Message], arguments: WriteArguments = as_object
) -> list[Mapping[str, object]]:
    """The messages for the template. Tool results get the names of their functions."""
    names: dict[str, str] = {}
    rendered = []
    for message in messages:
        for call in message.calls:
            names[call.id] = call.name
        rendered.append(_template_message(message, names, arguments))
    return rendered


def in_place(messages: Sequence[Message], roles: "Roles") -> Sequence[Message]:
    """The messages in roles that the template renders where they stand.

    Where it has no place for later system messages, those at the head are one, and later ones are
    what the user says, in a `<system-reminder>` as Claude Code writes them. Where it takes nothing
    but an answer after tool results, what the user says there is a part of the last result.
    """
    joined = {("user", "reminder"), ("reminder", "user"), ("reminder", "reminder")}
    if roles.late_system == "user":
        joined.add(("system", "system"))
    if roles.behind_results == "tool":
        joined |= {("tool", "user"), ("tool", "reminder")}
    placed: list[tuple[Message, list[Part]]] = []
    has_begun = False
    last = ""
    for message in messages:
        said, kind = message, str(message.role)
        has_begun = has_begun or kind != "system"
        if kind == "system" and has_begun and roles.late_system == "user":
            said, kind = _reminder(message), "reminder"
        if (last, kind) in joined:
            placed[-1][1].extend(said.parts)
            last = last if last == "tool" else kind
        else:
            placed.append((said, [*said.parts]))
            last = kind
    return [replace(message, parts=tuple(parts)) for message, parts in placed]


def _reminder(message: Message) -> Message:
    reminder = f"<system-reminder>\n{message.text}\n</system-reminder>"
    return replace(message, role="user", parts=texts(reminder))


def has_thought_preamble(message: Message) -> bool:
    """Whether it has reasoning, then text, then a call."""
    return bool(message.calls and message.reasoning and message.text)


def fold_text_into_reasoning(message: Message) -> Message:
    """The message with its text as part of the reasoning, for templates that render one of them."""
    if not has_thought_preamble(message):
        return message
    return replace(message, parts=(), reasoning=f"{message.reasoning}\n\n{message.text}")


def _template_message(
    message: Message, names: Mapping[str, str], arguments: WriteArguments
) -> Mapping[str, object]:
    """One string of content, and the fields that templates know."""
    fields: dict[str, object] = {"role": message.role, "content": message.text}
    name = message.name or names.get(message.answered_call or "")
    if name:
        fields["name"] = name
    if message.calls:
        fields["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": arguments(call.arguments)},
            }
            for call in message.calls
        ]
    if message.answered_call is not None:
        fields["tool_call_id"] = message.answered_call
    if message.reasoning:
        fields |= dict.fromkeys(REASONING_FIELDS, message.reasoning)
    return fields


_WORD = "somethingthatissaid"
_CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {}}}
_RESULT: Sequence[Mapping[str, object]] = (
    {"role": "user", "content": "A"},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "abcdefghi", "name": "f", "content": _WORD},
)
_BEHIND_RESULT = (
    *_RESULT[:-1],
    {**_RESULT[-1], "content": "B"},
    {"role": "user", "content": _WORD},
)
_LATE_SYSTEM = (
    {"role": "system", "content": "A"},
    {"role": "user", "content": "B"},
    {"role": "system", "content": _WORD},
    {"role": "assistant", "content": "C"},
    {"role": "user", "content": "D"},
)


def _called(content: str, reasoning: str) -> Sequence[Mapping[str, object]]:
    thoughts = dict.fromkeys(REASONING_FIELDS, reasoning)
    call = {**_RESULT[1], "content": content, **thoughts}
    return (_RESULT[0], call, {**_RESULT[2], "content": "B"})


_SYSTEM = ({"role": "system", "content": _WORD}, {"role": "user", "content": "A"})
_PREAMBLE = _called(_WORD, "C")
_THOUGHT_PREAMBLE = _called("", f"C\n\n{_WORD}")


@dataclass(frozen=True, slots=True)
class Roles:
    """The roles or fields under which a template renders what not every template can.

    `late_system`: the role of system messages after the first. `behind_results`: the role of a user
    message right after tool results. `preambles`: the field of an assistant's text before a call,
    where there is reasoning too. `system`: the role of the system messages before all others, where
    the server describes the tools.
    """

    late_system: Literal["system", "user"]
    behind_results: Literal["user", "tool"]
    preambles: Literal["content", "reasoning"]
    system: SystemRole


def roles_of(tokenizer: Tokenizer) -> Roles:
    """The roles with which the model's template raises no error and leaves nothing out."""
    renders = partial(_template_renders, tokenizer)
    has_late_system = renders(_LATE_SYSTEM)
    needs_an_answer = renders(_RESULT) and not renders(_BEHIND_RESULT)
    wants_one = not renders(_PREAMBLE) and renders(_THOUGHT_PREAMBLE)
    return Roles(
        late_system="system" if has_late_system else "user",
        behind_results="tool" if needs_an_answer else "user",
        preambles="reasoning" if wants_one else "content",
        system="system" if renders(_SYSTEM) else "user",
    )


def _template_renders(tokenizer: Tokenizer, messages: Sequence[Mapping[str, object]]) -> bool:
    try:
        return _WORD in tokenizer.decode(tokenizer.apply_chat_template(messages))
    except ValueError:
        return False


def concerns_tools(message: Mapping[str, object]) -> bool:
    """Whether the message has calls, or is the result of one."""
    return message["role"] == "tool" or "tool_calls" in message
