"""A conversation as the arguments of a chat template."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engine.values.model import Replay
from server.generation.conversation import Conversation, Message
from server.generation.replays import AssistantTurn, Call, Replays
from server.generation.tools import CustomToolCall, FunctionToolCall

NO_EFFORT = "none"
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""The names that templates use: most the first, gpt-oss's the last."""

ROLES = {"developer": "system", "function": "tool"}
"""What templates call these roles."""

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
            names[call.id] = call.function.name
        rendered.append(_template_message(message, names, arguments))
    return rendered


def has_thought_preamble(message: Message) -> bool:
    """Whether it has reasoning, then text, then a call."""
    return bool(message.calls and _reasoning(message) and _text(message))


def preamble_as_thought(message: Message) -> Message:
    """The message with its text as part of the reasoning, for templates that render one of them."""
    if not has_thought_preamble(message):
        return message
    thought = f"{_reasoning(message)}\n\n{_text(message)}"
    return message.model_copy(update={"content": None, "reasoning_content": thought})


def template_arguments(body: Conversation) -> dict[str, Any]:
    """The template's arguments besides the messages."""
    arguments: dict[str, Any] = {}
    if body.reasoning_effort is not None:
        arguments["reasoning_effort"] = body.reasoning_effort
        if body.reasoning_effort == NO_EFFORT:
            arguments["enable_thinking"] = False
    arguments |= body.chat_template_kwargs
    if body.continue_final_message:
        arguments |= {"continue_final_message": True, "add_generation_prompt": False}
    if not body.add_generation_prompt:
        arguments["add_generation_prompt"] = False
    if tools := _declared(body):
        arguments["tools"] = tools
    return arguments


def found_replays(
    replays: Replays, messages: Sequence[Message], cache_salt: str
) -> dict[int, Replay]:
    """The tokens of answers that this server wrote, by the index of their message."""
    found = {}
    for index, message in enumerate(messages):
        calls = message.calls
        if not calls or not replays.knows(cache_salt, [call.id for call in calls]):
            continue  # before the arguments are parsed
        replay = replays.find(cache_salt, _turn(message, calls))
        if replay is not None:
            found[index] = replay
    return found


def _turn(message: Message, calls: Sequence[FunctionToolCall | CustomToolCall]) -> AssistantTurn:
    return AssistantTurn(
        [Call(call.id, call.function.name, as_object(call.function.arguments)) for call in calls],
        _text(message),
        _reasoning(message),
    )


def _reasoning(message: Message) -> str | None:
    return message.reasoning_content or message.reasoning


def _text(message: Message) -> str:
    return "\n".join(part.text for part in message.content or ())


def _declared(body: Conversation) -> list[dict[str, Any]]:
    """The tools in the prompt: with a named choice all, so that the prompt is the same from turn to
    turn; with `none` none."""
    if body.tool_choice == "none":
        return []
    return [tool.for_template() for tool in body.tools]


def _template_message(
    message: Message, names: Mapping[str, str], arguments: WriteArguments
) -> Mapping[str, object]:
    """One string of content, and a role that templates know.

    A template that does not know `developer` would render a role that its model never saw; one that
    does treats `system` alike.
    """
    fields: dict[str, object] = {
        "role": ROLES.get(message.role, message.role),
        "content": _text(message),
    }
    name = message.name or names.get(message.answered_call or "")
    if name:
        fields["name"] = name
    if calls := message.calls:
        fields["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": arguments(call.function.arguments),
                },
            }
            for call in calls
        ]
    if message.answered_call is not None:
        fields["tool_call_id"] = message.answered_call
    if reasoning := _reasoning(message):
        fields |= dict.fromkeys(REASONING_FIELDS, reasoning)
    return fields
