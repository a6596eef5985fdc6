"""The tools of a Responses request as functions of a chat request, and their calls back again."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
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
from server.errors import InvalidField
from server.generation.conversation import check_tools
from server.generation.tools import (
    MAX_NAME_CHARACTERS,
    MAX_TOOLS,
    Tool,
    ToolChoice,
    custom_tool,
    function_tool,
)
from server.parsing.json_schema import is_enforced

MAX_LOGGED = 8  # types of hosted tools

ToolT = TypeVar("ToolT", bound=ResponseTool)


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
    """The tools of one request, except hosted ones, which are not served. `found` are those of
    items of the input, a list for each of these items.

    `is_strict` decides for functions whose `strict` the client left out. Raises ApiError (400) for
    two tools whose calls could not be told apart.
    """

    def __init__(
        self,
        tools: Sequence[ResponseTool],
        found: Sequence[Sequence[ResponseTool]] = (),
        is_strict: Callable[[FunctionTool], bool] = is_enforceable,
    ) -> None:
        given = [*tools, *chain.from_iterable(found)]
        self.has_default_strict = any(
            isinstance(tool, FunctionTool) and tool.strict is None for tool, _ in _flat(given)
        )
        """Whether `is_strict` has decided for any of them."""
        tools = [_with_strict(tool, is_strict) for tool in tools]
        self.declared = [_declared(tool) for tool in tools if not isinstance(tool, HostedTool)]
        """The tools as the client sent them, with `strict` as it is applied."""
        self.by_function: dict[str, ClientTool] = {}
        """The tools by the names of their functions."""
        self._hosted = set[str]()
        self.functions = list(self._functions(tools))
        """The functions that stand for the tools."""
        self.found = [
            list(self._functions([_with_strict(tool, is_strict) for tool in each]))
            for each in found
        ]
        """Likewise for those of each of the items."""
        _check_lengths([*self.functions, *chain.from_iterable(self.found)])
        check_tools(self.functions, "tools")
        self.hosted = sorted(self._hosted)[:MAX_LOGGED]
        """Some types of the hosted tools."""

    def _functions(self, tools: Sequence[ResponseTool]) -> Iterator[Tool]:
        for tool, namespace in _flat(tools):
            if isinstance(tool, HostedTool):
                self._hosted.add(tool.type[:64])
                continue
            name = function_name(tool.name, namespace)
            client_tool = ClientTool(tool.name, namespace, isinstance(tool, CustomTool))
            if self.by_function.setdefault(name, client_tool) != client_tool:
                raise InvalidField("tools", f"two tools are called as '{name}'")
            yield _function(name, tool)


def _with_strict(tool: ToolT, is_strict: Callable[[FunctionTool], bool]) -> ToolT:
    match tool:
        case FunctionTool(strict=None):
            return tool.model_copy(update={"strict": is_strict(tool)})
        case NamespaceTool():
            inner = [_with_strict(each, is_strict) for each in tool.tools]
            return tool.model_copy(update={"tools": inner})
        case _:
            return tool


def _flat(
    tools: Sequence[ResponseTool],
) -> Iterator[tuple[FunctionTool | CustomTool | HostedTool, str | None]]:
    """The tools, each with its namespace."""
    for tool in tools:
        if isinstance(tool, NamespaceTool):
            for inner in tool.tools:
                yield inner, tool.name
        else:
            yield tool, None


def _check_lengths(functions: Sequence[Tool]) -> None:
    """Raise ApiError (400) for more functions than a request may have, and for a name that is too
    long with its namespace.
    """
    if len(functions) > MAX_TOOLS:
        raise InvalidField("tools", f"at most {MAX_TOOLS} tools, those of namespaces among them")
    if any(len(function.name) > MAX_NAME_CHARACTERS for function in functions):
        problem = f"a name and its namespace have at most {MAX_NAME_CHARACTERS} characters"
        raise InvalidField("tools", problem)


def chat_choice(choice: ResponseToolChoice) -> ToolChoice:
    """The choice in terms of the tools' functions."""
    match choice:
        case ChosenTool():
            return ToolChoice("required", _names([choice]))
        case ChosenTools():
            return ToolChoice(choice.mode, _names(choice.tools))
        case _:
            return ToolChoice(choice)


def _names(tools: Iterable[ChosenTool]) -> frozenset[str]:
    return frozenset(function_name(tool.name, tool.namespace) for tool in tools)


def _function(name: str, tool: FunctionTool | CustomTool) -> Tool:
    if isinstance(tool, CustomTool):
        format = tool.format or InputFormat(type="text")
        return custom_tool(name, tool.description, format.syntax, format.definition)
    return function_tool(name, tool.description, tool.parameters, strict=bool(tool.strict))


def _declared(tool: ResponseTool) -> dict[str, Any]:
    """The tool with the keys that OpenAI always sends."""
    declared = tool.model_dump(exclude_none=True)
    return (
        {**declared, "parameters": tool.parameters} if isinstance(tool, FunctionTool) else declared
    )
