"""Tools, tool choices and tool calls.

A custom tool's input is free text. To the model, a custom tool is a function with one parameter.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from server.json_model import OBJECT, ByType, RequestModel, any_of, of_type, present, type_of
from server.parsing.json_text import whole_characters

CUSTOM_INPUT = "input"
"""The function's one parameter."""


def custom_function(
    name: str, description: str | None, syntax: str | None, grammar: str | None
) -> dict[str, Any]:
    """The function as a chat declares it. It is strict, so that the input can be read back. The
    grammar is part of its description, and not enforced.
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
    return {
        "name": name,
        "description": about.strip(),
        "parameters": parameters,
        "strict": True,
    }


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


MAX_TOOLS = 1024
FUNCTION_NAME = r"^[a-zA-Z0-9_.:/-]{1,256}$"

FunctionName = Annotated[str, Field(pattern=FUNCTION_NAME)]


class FunctionDeclaration(RequestModel):
    """A function as the prompt describes it. Keys beyond OpenAI's reach the chat template."""

    model_config = ConfigDict(extra="allow")

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False


class ChatFunctionTool(RequestModel):
    model_config = ConfigDict(extra="allow")

    type: Literal["function"]
    function: FunctionDeclaration

    def for_template(self) -> dict[str, Any]:
        """The declaration as received, without `strict`, which the server handles."""
        declared = self.model_dump(exclude_unset=True)
        declared["function"].pop("strict", None)
        return declared


class CustomGrammar(RequestModel):
    syntax: Literal["lark", "regex"]
    definition: str


class CustomFormat(RequestModel):
    """The format of a custom tool's input. It is in the prompt, and not enforced."""

    model_config = any_of(of_type("text"), present(grammar=OBJECT))

    type: Literal["text", "grammar"]
    grammar: CustomGrammar | None = None

    @model_validator(mode="after")
    def _has_its_grammar(self) -> "CustomFormat":
        if self.type == "grammar" and self.grammar is None:
            raise PydanticCustomError("grammar", "grammar is missing")
        return self


class CustomDeclaration(RequestModel):
    name: FunctionName
    description: str | None = None
    format: CustomFormat | None = None


class ChatCustomTool(RequestModel):
    """A tool whose input is free text."""

    type: Literal["custom"]
    custom: CustomDeclaration

    @property
    def function(self) -> FunctionDeclaration:
        """The function that stands for the tool in the prompt."""
        custom = self.custom
        grammar = custom.format.grammar if custom.format else None
        syntax, definition = (grammar.syntax, grammar.definition) if grammar else (None, None)
        declared = custom_function(custom.name, custom.description, syntax, definition)
        return FunctionDeclaration(**declared)

    def for_template(self) -> dict[str, Any]:
        """The declaration as a function tool."""
        return ChatFunctionTool(type="function", function=self.function).for_template()


UNKNOWN_TYPE = "tools of type '{kind}' are not supported, only 'function' and 'custom'"

ChatTool = Annotated[
    ChatFunctionTool | ChatCustomTool, ByType(ChatFunctionTool, unknown=UNKNOWN_TYPE)
]
Tools = Annotated[list[ChatTool], Field(max_length=MAX_TOOLS, fail_fast=True)]


class NamedFunction(RequestModel):
    name: FunctionName


FunctionChoice = Literal["none", "auto"] | NamedFunction
"""The `function_call` that goes with `functions`."""


class NamedToolChoice(RequestModel):
    """This function must be called."""

    type: Literal["function"]
    function: NamedFunction

    @property
    def name(self) -> str:
        return self.function.name


class NamedCustomChoice(RequestModel):
    """This custom tool must be called."""

    type: Literal["custom"]
    custom: NamedFunction

    @property
    def name(self) -> str:
        return self.custom.name


NamedChoice = Annotated[
    NamedToolChoice | NamedCustomChoice, ByType(NamedToolChoice, unknown=UNKNOWN_TYPE)
]


class AllowedTools(RequestModel):
    mode: Literal["auto", "required"]
    tools: list[NamedChoice] = Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)


class AllowedToolChoice(RequestModel):
    """Only these may be called; all tools are in the prompt."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _choice_kind(choice: object) -> str:
    if isinstance(choice, str):
        return "Mode"
    return "Allowed" if type_of(choice) == "allowed_tools" else "Named"


CHOICE_KIND = Discriminator(_choice_kind)
"""Metadata of a union of what is tagged `Mode`, `Named` and `Allowed`."""

ToolMode = Annotated[Literal["none", "auto", "required"], Tag("Mode")]
ToolChoice = Annotated[
    ToolMode | Annotated[NamedChoice, Tag("Named")] | Annotated[AllowedToolChoice, Tag("Allowed")],
    CHOICE_KIND,
]


def chosen_names(choice: ToolChoice) -> list[str] | None:
    """The tools that a choice names; None where it names none."""
    match choice:
        case str():
            return None
        case AllowedToolChoice(allowed_tools=allowed):
            return [tool.name for tool in allowed.tools]
        case _:
            return [choice.name]


def must_call(choice: ToolChoice) -> bool:
    match choice:
        case str():
            return choice == "required"
        case AllowedToolChoice(allowed_tools=allowed):
            return allowed.mode == "required"
        case _:
            return True


def _as_text(arguments: object) -> object:
    """An object, as other servers take it, as its JSON text."""
    if isinstance(arguments, Mapping):
        return json.dumps(arguments, ensure_ascii=False)
    if not isinstance(arguments, str):
        raise PydanticCustomError("arguments", "must be JSON text, or an object")
    return arguments


class FunctionCall(RequestModel):
    name: str
    arguments: Annotated[
        str, BeforeValidator(_as_text, json_schema_input_type=str | dict[str, Any])
    ] = "{}"


class FunctionToolCall(RequestModel):
    """A call that an assistant made, in a history."""

    id: str = Field("", max_length=256)
    type: Literal["function"] = "function"
    function: FunctionCall


class CustomCall(RequestModel):
    name: str
    input: str


class CustomToolCall(RequestModel):
    """A call of a custom tool, in a history."""

    id: str = Field("", max_length=256)
    type: Literal["custom"]
    custom: CustomCall

    @property
    def function(self) -> FunctionCall:
        """The call as the model wrote it."""
        return FunctionCall(name=self.custom.name, arguments=custom_arguments(self.custom.input))


ToolCall = Annotated[
    FunctionToolCall | CustomToolCall, ByType(FunctionToolCall, unknown=UNKNOWN_TYPE)
]
ToolCalls = Annotated[list[ToolCall], Field(max_length=MAX_TOOLS, fail_fast=True)]
