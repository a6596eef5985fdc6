"""The tools of a Responses request as functions of a chat request, and their calls back again."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

from server.dialects.responses.client_tools import FORM_BY_TOOL, TOOL_SEARCH, CallForm
from server.dialects.responses.items import (
    BuiltInTool,
    CustomTool,
    FunctionTool,
    HostedTool,
    InputFormat,
    NamespaceTool,
    ResponseTool,
)
from server.dialects.responses.schema import (
    ChosenKind,
    ChosenTool,
    ChosenTools,
    ResponseToolChoice,
)
from server.errors import UNSUPPORTED, InvalidField
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

HOSTED = frozenset(
    {
        "code_interpreter",
        "computer",
        "computer_use",
        "computer_use_preview",
        "file_search",
        "image_generation",
        "mcp",
        "programmatic_tool_calling",
        "web_search",
        "web_search_preview",
        "web_search_preview_2025_03_11",
    }
)
"""The hosted tools that OpenAI's API lets a request choose."""

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
    form: CallForm | None = None  # of its calls, where they are items of a kind of their own


def is_enforceable(tool: FunctionTool) -> bool:
    """Whether a grammar can enforce the schema of the tool's parameters."""
    return is_enforced(tool.parameters or {})


class RequestTools:
    """The tools of one request, except hosted ones, which are not served. `found` are those of
    items of the input, a list for each of these items: none of them is deferred.

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
        self.declared = [_declared(tool) for tool in tools if not _is_hosted(tool)]
        """The tools as the client sent them, with `strict` as it is applied."""
        self.by_function: dict[str, ClientTool] = {}
        """The tools by the names of their functions."""
        self.hosted = Counter[str]()
        """The number of hosted tools by their types."""
        searches = any(
            isinstance(tool, BuiltInTool) and tool.type == TOOL_SEARCH and not tool.is_hosted
            for tool in given
        )
        self.functions = list(self._functions(tools, defers=searches))
        """The functions that stand for the tools."""
        self.found = [
            list(self._functions([_with_strict(tool, is_strict) for tool in each], defers=False))
            for each in found
        ]
        """Likewise for those of each of the items."""
        _check_lengths([*self.functions, *chain.from_iterable(self.found)])
        check_tools(self.functions, "tools")

    def _functions(self, tools: Sequence[ResponseTool], *, defers: bool) -> Iterator[Tool]:
        for tool, namespace in _flat(tools):
            if isinstance(tool, HostedTool) or _is_hosted(tool):
                self.hosted[tool.type] += 1
                continue
            name = function_name(
                tool.type if isinstance(tool, BuiltInTool) else tool.name, namespace
            )
            client_tool = _client_tool(tool, namespace)
            if self.by_function.setdefault(name, client_tool) != client_tool:
                raise InvalidField("tools", f"two tools are called as '{name}'")
            yield _function(name, tool, is_deferred=defers and _is_deferred(tool))

    def choice(self, choice: ResponseToolChoice) -> ToolChoice:
        """The choice in terms of the tools' functions. It is `auto` where no tool is left of those
        that have to be called, as hosted ones were dropped.

        Raises ApiError (400) for a kind of tool that the API does not know.
        """
        match choice:
            case ChosenTools():
                names = self._chosen(choice.tools)
                return ToolChoice(choice.mode, names) if names else ToolChoice("none")
            case ChosenTool() | ChosenKind():
                names = self._chosen([choice])
                return ToolChoice("required", names) if names else ToolChoice()
            case "required" if self.hosted and not self.by_function:
                return ToolChoice()
            case _:
                return ToolChoice(choice)

    def _chosen(self, tools: Iterable[ChosenTool | ChosenKind]) -> frozenset[str]:
        """The names of the functions of these tools, but for those that are dropped."""
        names = set[str]()
        for tool in tools:
            if isinstance(tool, ChosenTool):
                names.add(function_name(tool.name, tool.namespace))
            elif tool.type in FORM_BY_TOOL and tool.type not in self.hosted:
                names.add(tool.type)
            elif tool.type not in HOSTED and tool.type not in self.hosted:
                message = f"there are no tools of type '{tool.type}'"
                raise InvalidField("tool_choice", message, UNSUPPORTED)
        return frozenset(names)


def _is_hosted(tool: ResponseTool) -> bool:
    return isinstance(tool, HostedTool) or (isinstance(tool, BuiltInTool) and tool.is_hosted)


def _is_deferred(tool: FunctionTool | CustomTool | BuiltInTool) -> bool:
    return not isinstance(tool, BuiltInTool) and tool.defer_loading


def _client_tool(
    tool: FunctionTool | CustomTool | BuiltInTool, namespace: str | None
) -> ClientTool:
    if isinstance(tool, BuiltInTool):
        return ClientTool(tool.type, form=FORM_BY_TOOL[tool.type])
    return ClientTool(tool.name, namespace, isinstance(tool, CustomTool))


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
) -> Iterator[tuple[FunctionTool | CustomTool | BuiltInTool | HostedTool, str | None]]:
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


def _function(
    name: str, tool: FunctionTool | CustomTool | BuiltInTool, *, is_deferred: bool
) -> Tool:
    match tool:
        case CustomTool():
            format = tool.format or InputFormat(type="text")
            return custom_tool(
                name, tool.description, format.syntax, format.definition, is_deferred=is_deferred
            )
        case BuiltInTool():
            form = FORM_BY_TOOL[tool.type]
            own = tool.parameters if isinstance(tool.parameters, dict) else None
            description = tool.description or form.description
            return function_tool(name, description, own or form.parameters, strict=own is None)
        case _:
            return function_tool(
                name,
                tool.description,
                tool.parameters,
                strict=bool(tool.strict),
                is_deferred=is_deferred,
            )


def _declared(tool: ResponseTool) -> dict[str, Any]:
    """The tool with the keys that OpenAI always sends."""
    declared = tool.model_dump(exclude_none=True, exclude_unset=True)
    match tool:
        case FunctionTool():
            return {**declared, "parameters": tool.parameters, "strict": tool.strict}
        case NamespaceTool():
            return {**declared, "tools": declared.get("tools", [])}
        case _:
            return declared
