"""Tools of a response: functions in the flat shape, custom ones, namespaces of both."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from server.schemas.base import RequestModel, type_of
from server.schemas.tools import FUNCTION_NAME, MAX_TOOLS

ToolName = Annotated[str, Field(pattern=FUNCTION_NAME)]


class FunctionTool(RequestModel):
    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(
        None, description="Left out: strict, if a grammar can enforce all that `parameters` say."
    )


class InputFormat(RequestModel):
    """The format of a custom tool's input. It is in the prompt, and not enforced."""

    type: Literal["text", "grammar"]
    syntax: str | None = Field(None, max_length=64)
    definition: str | None = None


class CustomTool(RequestModel):
    """A tool whose input is free text."""

    type: Literal["custom"]
    name: ToolName
    description: str | None = None
    format: InputFormat | None = None


class HostedTool(RequestModel):
    """Any other: run by OpenAI's servers, or by clients with a protocol of its own. Dropped."""

    type: str


def _tool_kind(tool: object) -> str:
    kinds = {"function": "Function", "custom": "Custom", "namespace": "Namespace"}
    return kinds.get(type_of(tool), "Hosted")


def _as_it_is(value: object) -> object:
    return value


_Flat = (
    Annotated[FunctionTool, Tag("Function")]
    | Annotated[CustomTool, Tag("Custom")]
    | Annotated[HostedTool, Tag("Hosted")]
)
NamespacedTool = Annotated[
    _Flat,
    Discriminator(_tool_kind),
    BeforeValidator(_as_it_is, json_schema_input_type=FunctionTool | CustomTool | HostedTool),
]


class NamespaceTool(RequestModel):
    """Tools under a common name: each is called by its own name within this one."""

    type: Literal["namespace"]
    name: ToolName
    description: str | None = None
    tools: list[NamespacedTool] = Field(default_factory=list, max_length=MAX_TOOLS, fail_fast=True)


ResponseTool = Annotated[
    _Flat | Annotated[NamespaceTool, Tag("Namespace")],
    Discriminator(_tool_kind),
    BeforeValidator(
        _as_it_is, json_schema_input_type=FunctionTool | CustomTool | NamespaceTool | HostedTool
    ),
]
ResponseTools = Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS, fail_fast=True)]


class ChosenTool(RequestModel):
    """One tool by its name."""

    type: Literal["function", "custom"]
    name: ToolName
    namespace: ToolName | None = None


class ChosenTools(RequestModel):
    """Only these may be called; all tools are in the prompt."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"] = "auto"
    tools: list[ChosenTool] = Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)


def _choice_kind(choice: object) -> str:
    if isinstance(choice, str):
        return "Word"
    return "Allowed" if type_of(choice) == "allowed_tools" else "Chosen"


ResponseToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("Word")]
    | Annotated[ChosenTool, Tag("Chosen")]
    | Annotated[ChosenTools, Tag("Allowed")],
    Discriminator(_choice_kind),
]
