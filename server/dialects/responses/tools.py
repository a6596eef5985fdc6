"""The tools of a Responses request as functions of a chat request, and their calls back again."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from server.dialects.responses.schema import (
    ChosenTool,
    ChosenTools,
    CustomTool,
    FunctionTool,
    HostedTool,
    InputFormat,
    NamespaceTool,
    ResponseTool,
    ResponseToolChoice,
)
from server.generation.tools import custom_function
from server.parsing.enforced_schemas import is_enforced

MAX_LOGGED = 8

Tool = TypeVar("Tool", bound=ResponseTool)

log = logging.getLogger("rootstock.responses")


def function_name(name: str, namespace: str | None) -> str:
    """The name of a tool's function: unique across namespaces."""
    return f"{namespace}__{name}" if namespace else name


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


def without_default_strict(tools: Sequence[ResponseTool]) -> list[ResponseTool] | None:
    """The tools, of which none is strict but those that say so; None where that changes none."""
    loose = [_without_default_strict(tool) for tool in tools]
    is_changed = any(one is not tool for one, tool in zip(loose, tools, strict=True))
    return loose if is_changed else None


def _without_default_strict(tool: Tool) -> Tool:
    match tool:
        case FunctionTool(strict=None):
            return tool.model_copy(update={"strict": False})
        case NamespaceTool():
            tools = without_default_strict(tool.tools)
            return tool if tools is None else tool.model_copy(update={"tools": tools})
        case _:
            return tool


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
        format = tool.format or InputFormat(type="text")
        return custom_function(name, tool.description, format.syntax, format.definition)
    function: dict[str, Any] = {"name": name}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.parameters is not None:
        function["parameters"] = tool.parameters
    return function | {"strict": _is_strict(tool)}


def _is_strict(tool: FunctionTool) -> bool:
    """As the client says. A client that says nothing means strict, as at OpenAI, unless there are
    keywords in the schema that no grammar may be able to enforce: those would be an error.
    """
    return is_enforced(tool.parameters or {}) if tool.strict is None else tool.strict


def _as_declared(tool: ResponseTool) -> dict[str, Any]:
    """With the keys that OpenAI always sends, and `strict` as it is applied."""
    declared = tool.model_dump(exclude_none=True)
    match tool:
        case FunctionTool():
            declared.setdefault("parameters", None)
            declared["strict"] = _is_strict(tool)
        case NamespaceTool():
            for inner, rendered in zip(tool.tools, declared["tools"], strict=True):
                if isinstance(inner, FunctionTool):
                    rendered["strict"] = _is_strict(inner)
    return declared
