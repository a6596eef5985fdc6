"""A conversation as chat templates know it."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engine.types.model import Replay
from server.generation.replays import Call, Replays, Said
from server.schemas.chat import Conversation, Message
from server.schemas.tools import ToolCall

NO_EFFORT = "none"
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""What templates call it: most the first, gpt-oss's the last."""

WriteArguments = Callable[[str], object]
"""What a template is given for the JSON text of a call's arguments."""


def as_object(arguments: str) -> object:
    """As most templates have it; text that is no object stays as it is."""
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def as_text(arguments: str) -> object:
    """As DeepSeek's templates have it, which put it together with other text."""
    return arguments or "{}"


def template_messages(
    messages: Sequence[Message], arguments: WriteArguments = as_object
) -> list[Mapping[str, object]]:
    """The messages, the results of calls with the names of their functions."""
    names: dict[str, str] = {}
    rendered = []
    for message in messages:
        for call in message.tool_calls or ():
            names[call.id] = call.function.name
        rendered.append(_template_message(message, names, arguments))
    return rendered


def has_thought_preamble(message: Message) -> bool:
    """Whether it has reasoning, a call, and something that is said in between."""
    return bool(message.tool_calls and _reasoning(message) and _text(message))


def preamble_as_thought(message: Message) -> Message:
    """The message for a template that takes one text before a call: all of it as reasoning."""
    if not has_thought_preamble(message):
        return message
    thought = f"{_reasoning(message)}\n\n{_text(message)}"
    return message.model_copy(update={"content": None, "reasoning_content": thought})


def template_arguments(body: Conversation) -> dict[str, Any]:
    """What a request tells the template besides its messages."""
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
    """How answers of the history were written, by the index of their message, where it is known."""
    found = {}
    for index, message in enumerate(messages):
        calls = message.tool_calls or ()
        if not calls or not replays.knows(cache_salt, [call.id for call in calls]):
            continue  # so that nothing is parsed in vain
        replay = replays.find(cache_salt, _said(message, calls))
        if replay is not None:
            found[index] = replay
    return found


def _said(message: Message, calls: Sequence[ToolCall]) -> Said:
    return Said(
        [Call(call.id, call.function.name, as_object(call.function.arguments)) for call in calls],
        _text(message),
        _reasoning(message),
    )


def _reasoning(message: Message) -> str | None:
    return message.reasoning_content or message.reasoning


def _text(message: Message) -> str:
    return "\n".join(part.text for part in message.content or ())


def _declared(body: Conversation) -> list[dict[str, Any]]:
    """The tools that the model is told of: with a named choice all, so that the prompt is the same
    from turn to turn; with `none` none."""
    if body.tool_choice == "none":
        return []
    return [tool.for_template() for tool in body.tools]


def _template_message(
    message: Message, names: Mapping[str, str], arguments: WriteArguments
) -> Mapping[str, object]:
    """One string of content, no `developer`.

    A template that has never heard of `developer` renders it as it stands, a role that its model
    never saw; one that has takes `system` for the same. So `system` is right for both.
    """
    fields: dict[str, object] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": _text(message),
    }
    name = message.name or names.get(message.tool_call_id or "")
    if name:
        fields["name"] = name
    if message.tool_calls:
        fields["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": arguments(call.function.arguments),
                },
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    if reasoning := _reasoning(message):
        fields |= dict.fromkeys(REASONING_FIELDS, reasoning)
    return fields
