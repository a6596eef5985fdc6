"""The tools of a Responses request as functions of a chat request, and their calls back again."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
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
class ClientTool:
    """A tool by the names that the client has for it."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


def is_enforceable(tool: FunctionTool) -> bool:
    """Whether a grammar can enforce the schema of the tool's parameters."""
    return is_enforced(tool.parameters or {})


class RequestTools:
    """The tools of one request, except hosted ones, which are not served.

    `is_strict` decides for functions whose `strict` the client left out.
    """

    def __init__(
        self,
        tools: Sequence[ResponseTool],
        is_strict: Callable[[FunctionTool], bool] = is_enforceable,
    ) -> None:
        tools = [_with_strict(tool, is_strict) for tool in tools]
        self.functions: list[dict[str, Any]] = []
        """The tools as a chat request declares them."""
        self.declared = [_declared(tool) for tool in tools if not isinstance(tool, HostedTool)]
        """The tools as the client sent them, and as they are applied."""
        self.by_function: dict[str, ClientTool] = {}
        """The tools by the names of their functions."""
        for tool, namespace in flat(tools):
            if not isinstance(tool, HostedTool):
                name = function_name(tool.name, namespace)
                self.by_function[name] = ClientTool(
                    tool.name, namespace, isinstance(tool, CustomTool)
                )
                self.functions.append({"type": "function", "function": _function(name, tool)})


def _with_strict(tool: Tool, is_strict: Callable[[FunctionTool], bool]) -> Tool:
    match tool:
        case FunctionTool(strict=None):
            return tool.model_copy(update={"strict": is_strict(tool)})
        case NamespaceTool():
            inner = [_with_strict(each, is_strict) for each in tool.tools]
            return tool.model_copy(update={"tools": inner})
        case _:
            return tool


def flat(
    tools: Sequence[ResponseTool],
) -> Iterator[tuple[FunctionTool | CustomTool | HostedTool, str | None]]:
    """The tools, each with its namespace."""
    for tool in tools:
        if isinstance(tool, NamespaceTool):
            for inner in tool.tools:
                yield inner, tool.name
        else:
            yield tool, None


def chat_choice(choice: ResponseToolChoice) -> object:
    """A chat request's `tool_choice`."""
    match choice:
        case ChosenTool():
            return _named(choice)
        case ChosenTools():
            allowed = {"mode": choice.mode, "tools": [_named(tool) for tool in choice.tools]}
            return {"type": "allowed_tools", "allowed_tools": allowed}
        case _:
            return choice


def log_dropped(tools: Sequence[ResponseTool], request_id: str) -> None:
    """Log which tools the model is not given."""
    kinds = sorted({tool.type[:64] for tool, _ in flat(tools) if isinstance(tool, HostedTool)})
    if kinds:
        log.info("request %s: no such tools here: %r", request_id, kinds[:MAX_LOGGED])


def _named(tool: ChosenTool) -> Mapping[str, object]:
    return {"type": "function", "function": {"name": function_name(tool.name, tool.namespace)}}


def _function(name: str, tool: FunctionTool | CustomTool) -> dict[str, Any]:
    if isinstance(tool, CustomTool):
        format = tool.format or InputFormat(type="text")
        return custom_function(name, tool.description, format.syntax, format.definition)
    return {
        "name": name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }


def _declared(tool: ResponseTool) -> dict[str, Any]:
    """The tool with the keys that OpenAI always sends."""
    declared = tool.model_dump(exclude_none=True)
    return (
        {**declared, "parameters": tool.parameters} if isinstance(tool, FunctionTool) else declared
    )
