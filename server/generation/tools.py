"""Tools, tool choices and tool calls, which every dialect reads its own into.

A custom tool's input is free text. To the model, a custom tool is a function with one parameter.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import jiter

from server.json_size import whole_characters

MAX_TOOLS = 1024
MAX_NAME_CHARACTERS = 256
FUNCTION_NAME = rf"^[a-zA-Z0-9_.:/-]{{1,{MAX_NAME_CHARACTERS}}}$"

CUSTOM_INPUT = "input"
"""The parameter of a custom tool's function."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. `declared` is its declaration in the prompt, an object
    with the keys `type` and `function`. A strict function's arguments are held to its schema. The
    model does not know a deferred one before a message makes it known.
    """

    declared: Mapping[str, Any]
    strict: bool = False
    is_custom: bool = False
    is_deferred: bool = False

    @property
    def name(self) -> str:
        return cast(str, self.declared["function"]["name"])

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The schema of its arguments."""
        return self.declared["function"].get("parameters") or {}


def function_tool(
    name: str,
    description: str | None = None,
    parameters: Mapping[str, Any] | None = None,
    *,
    strict: bool = False,
    is_deferred: bool = False,
) -> Tool:
    """The tool of a function whose declaration has these fields alone."""
    return Tool(_declared(name, description, parameters), strict, is_deferred=is_deferred)


def custom_tool(
    name: str,
    description: str | None,
    syntax: str | None,
    grammar: str | None,
    *,
    is_deferred: bool = False,
) -> Tool:
    """The tool of the function that stands for a custom tool. It is strict, so that the input can
    be read back. The grammar is part of its description, and not enforced.
    """
    about = description or ""
    if grammar:
        about += f"\n\nThe input must match this grammar{f' ({syntax})' if syntax else ''}:\n"
        about += grammar
    text = {"type": "string", "description": "The tool's input, as free text."}
    parameters = {
        "type": "object",
        "properties": {CUSTOM_INPUT: text},
        "required": [CUSTOM_INPUT],
        "additionalProperties": False,
    }
    declared = _declared(name, about.strip(), parameters)
    return Tool(declared, strict=True, is_custom=True, is_deferred=is_deferred)


def _declared(
    name: str, description: str | None, parameters: Mapping[str, Any] | None
) -> Mapping[str, Any]:
    fields = {"name": name, "description": description, "parameters": parameters}
    given = {field: value for field, value in fields.items() if value is not None}
    return {"type": "function", "function": given}


ToolMode = Literal["none", "auto", "required"]


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the model may or must call tools, and which. All tools are in the prompt, so that it
    is the same from turn to turn.
    """

    mode: ToolMode = "auto"
    names: frozenset[str] | None = None  # None: all

    @property
    def must_call(self) -> bool:
        return self.mode == "required"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that an assistant made. `arguments` is JSON text, as the client sent it."""

    id: str
    name: str
    arguments: str


UNREADABLE = "arguments"
"""The name of the argument whose value is the text of arguments that are no JSON object, where
there has to be an object.
"""


def arguments_object(
    text: str, partial: Literal["on", "trailing-strings"]
) -> dict[str, Any] | None:
    """The arguments of a call as an object. None for text that is no object. Half characters become
    U+FFFD. Of text that was cut off, the object has what is complete, and with `trailing-strings`
    also the beginning of a string.
    """
    if text.strip() in {"", "null"}:
        return {}
    try:
        value = jiter.from_json(whole_characters(text).encode(), partial_mode=partial)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def custom_arguments(text: str) -> str:
    """A custom tool's input as the arguments of its function."""
    return json.dumps({CUSTOM_INPUT: text}, ensure_ascii=False)


def custom_input(arguments: str) -> str:
    """A custom tool's input, read from its function's arguments.

    Arguments without one, as of an answer that was cut off, are returned as they are.
    """
    try:
        value = json.loads(whole_characters(arguments))
    except (ValueError, RecursionError):
        return arguments
    text = value.get(CUSTOM_INPUT) if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments
