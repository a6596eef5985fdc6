"""The tools of a Responses request as functions of a chat request, and their calls back again."""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from server.schemas.responses.tools import (
    ChosenTool,
    ChosenTools,
    CustomTool,
    FunctionTool,
    HostedTool,
    NamespaceTool,
    ResponseTool,
    ResponseToolChoice,
)

CUSTOM_INPUT = "input"
"""The one parameter of the function that a custom tool becomes."""

MAX_LOGGED = 8

log = logging.getLogger("rootstock.responses")


def function_name(name: str, namespace: str | None) -> str:
    """The name of a tool's function: unique across namespaces."""
    return f"{namespace}__{name}" if namespace else name


def custom_arguments(text: str) -> str:
    """A custom tool's input as the arguments of its function."""
    return json.dumps({CUSTOM_INPUT: text}, ensure_ascii=False)


def custom_input(arguments: str) -> str:
    """A custom tool's input, read from its function's arguments.

    Arguments without one, as of an answer that was cut off, are returned as they are.
    """
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    text = value.get(CUSTOM_INPUT) if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


@dataclass(frozen=True, slots=True)
class ToolName:
    """A tool by the client's names."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


class RequestTools:
    """The tools of one request, but for hosted ones, which are not served."""

    def __init__(self, tools: Sequence[ResponseTool]) -> None:
        self.functions: list[dict[str, Any]] = []
        """As a chat request declares them."""
        self.declared = [_as_declared(tool) for tool in tools if not isinstance(tool, HostedTool)]
        """As the client sent them."""
        self._names: dict[str, ToolName] = {}
        for tool, namespace in _flat(tools):
            name = function_name(tool.name, namespace)
            self._names[name] = ToolName(tool.name, namespace, isinstance(tool, CustomTool))
            self.functions.append({"type": "function", "function": _function(name, tool)})

    def find(self, function: str) -> ToolName:
        """The tool of a function. One that the model made up is a tool of that name."""
        return self._names.get(function) or ToolName(function)


def chat_choice(choice: ResponseToolChoice) -> object:
    """A chat request's `tool_choice`."""
    match choice:
        case ChosenTool():
            return _named(choice)
        case ChosenTools():
            tools = [_named(tool) for tool in choice.tools]
            return {
                "type": "allowed_tools",
                "allowed_tools": {"mode": choice.mode, "tools": tools},
            }
        case _:
            return choice


def log_dropped(tools: Sequence[ResponseTool], request_id: str) -> None:
    """Log which tools the model is not given."""
    kinds = sorted({tool.type[:64] for tool in _all(tools) if isinstance(tool, HostedTool)})
    if kinds:
        log.info("request %s: no such tools here: %r", request_id, kinds[:MAX_LOGGED])


def _named(tool: ChosenTool) -> Mapping[str, object]:
    return {"type": "function", "function": {"name": function_name(tool.name, tool.namespace)}}


def _all(tools: Sequence[ResponseTool]) -> Iterator[ResponseTool]:
    for tool in tools:
        if isinstance(tool, NamespaceTool):
            yield from tool.tools
        else:
            yield tool


def _flat(
    tools: Sequence[ResponseTool],
) -> Iterator[tuple[FunctionTool | CustomTool, str | None]]:
    for tool in tools:
        match tool:
            case FunctionTool() | CustomTool():
                yield tool, None
            case NamespaceTool():
                for inner in tool.tools:
                    if not isinstance(inner, HostedTool):
                        yield inner, tool.name


def _function(name: str, tool: FunctionTool | CustomTool) -> dict[str, Any]:
    if isinstance(tool, CustomTool):
        return _custom_function(name, tool)
    function: dict[str, Any] = {"name": name}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.parameters is not None:
        function["parameters"] = tool.parameters
    return function | {"strict": tool.strict}


def _custom_function(name: str, tool: CustomTool) -> dict[str, Any]:
    """A function with one text parameter. It is strict, so that the input can be read back."""
    about = tool.description or ""
    if tool.format is not None and tool.format.definition:
        syntax = f" ({tool.format.syntax})" if tool.format.syntax else ""
        about += f"\n\nThe input must match this grammar{syntax}:\n{tool.format.definition}"
    text = {"type": "string", "description": "The tool's input, as free text."}
    parameters = {
        "type": "object",
        "properties": {CUSTOM_INPUT: text},
        "required": [CUSTOM_INPUT],
        "additionalProperties": False,
    }
    return {
        "name": name,
        "description": about.strip(),
        "parameters": parameters,
        "strict": True,
    }


def _as_declared(tool: ResponseTool) -> dict[str, Any]:
    """With the keys that OpenAI always sends."""
    declared = tool.model_dump(exclude_none=True)
    if isinstance(tool, FunctionTool):
        declared.setdefault("parameters", None)
    return declared
