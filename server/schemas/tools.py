"""Functions that a model may call, and its calls, as clients declare and send them back."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field
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
    """What a model is told of a function. Keys beyond OpenAI's reach the chat template."""

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


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice


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
