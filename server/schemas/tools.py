"""Tools, tool choices and tool calls, as clients send them."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from server.schemas.base import RequestModel
from server.schemas.errors import UNSUPPORTED

MAX_TOOLS = 1024
FUNCTION_NAME = r"^[a-zA-Z0-9_.:/-]{1,256}$"


def _function_alone(kind: str) -> str:
    if kind != "function":
        message = "tools of type '{kind}' are not supported, only 'function'"
        raise PydanticCustomError(UNSUPPORTED, message, {"kind": kind[:64]})
    return kind


FunctionType = Annotated[
    str, AfterValidator(_function_alone), Field(json_schema_extra={"const": "function"})
]


class FunctionDeclaration(RequestModel):
    """A function as the prompt describes it. Keys beyond OpenAI's reach the chat template."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(pattern=FUNCTION_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False


class Tool(RequestModel):
    model_config = ConfigDict(extra="allow")

    type: FunctionType
    function: FunctionDeclaration

    def for_template(self) -> dict[str, Any]:
        """The declaration as it came, but for what is the server's to see to."""
        declared = self.model_dump(exclude_unset=True)
        declared["function"].pop("strict", None)
        return declared


class NamedFunction(RequestModel):
    name: str = Field(pattern=FUNCTION_NAME)


class NamedToolChoice(RequestModel):
    """This function must be called."""

    type: FunctionType
    function: NamedFunction


class AllowedTools(RequestModel):
    mode: Literal["auto", "required"]
    tools: list[NamedToolChoice] = Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)


class AllowedToolChoice(RequestModel):
    """Only these may be called; all tools are in the prompt."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _kind(choice: object) -> str:
    if isinstance(choice, RequestModel):
        return type(choice).__name__
    if not isinstance(choice, dict):
        return "Mode"
    is_list = choice.get("type") == "allowed_tools"
    return AllowedToolChoice.__name__ if is_list else NamedToolChoice.__name__


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("Mode")]
    | Annotated[NamedToolChoice, Tag(NamedToolChoice.__name__)]
    | Annotated[AllowedToolChoice, Tag(AllowedToolChoice.__name__)],
    Discriminator(_kind),
]


def chosen_names(choice: ToolChoice) -> list[str] | None:
    """The functions that a choice names; None where it names none."""
    match choice:
        case NamedToolChoice(function=function):
            return [function.name]
        case AllowedToolChoice(allowed_tools=allowed):
            return [tool.function.name for tool in allowed.tools]
        case _:
            return None


def must_call(choice: ToolChoice) -> bool:
    match choice:
        case NamedToolChoice():
            return True
        case AllowedToolChoice(allowed_tools=allowed):
            return allowed.mode == "required"
        case _:
            return choice == "required"


class FunctionCall(RequestModel):
    name: str
    arguments: str = "{}"


class ToolCall(RequestModel):
    """A call that an assistant made, in a history."""

    id: str = Field("", max_length=256)
    type: FunctionType = "function"
    function: FunctionCall


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]
ToolCalls = Annotated[list[ToolCall], Field(max_length=MAX_TOOLS, fail_fast=True)]
