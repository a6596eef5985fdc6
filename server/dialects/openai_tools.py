"""Tools, tool choices and tool calls as OpenAI's chats have them. Several dialects share them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from server.generation.foreign_history import Note, foreign_note
from server.generation.tools import (
    FUNCTION_NAME,
    MAX_TOOLS,
    Tool,
    ToolCall,
    ToolMode,
    custom_arguments,
    custom_tool,
)
from server.json_model import (
    OBJECT,
    ByType,
    ReadAs,
    RequestModel,
    any_of,
    of_type,
    other_types,
    present,
    type_of,
)

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

    def value(self) -> Tool:
        """The tool. Its declaration is as received, without `strict`, which the server handles."""
        declared = self.model_dump(exclude_unset=True)
        declared["function"].pop("strict", None)
        return Tool(declared, strict=self.function.strict)


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

    def value(self) -> Tool:
        """The function that stands for the tool."""
        custom = self.custom
        grammar = custom.format.grammar if custom.format else None
        syntax, definition = (grammar.syntax, grammar.definition) if grammar else (None, None)
        return custom_tool(custom.name, custom.description, syntax, definition)


@dataclass(frozen=True, slots=True)
class DroppedTool:
    """A tool that is not served."""

    kind: str


class ForeignTool(RequestModel):
    """A tool of another kind, which another server would run. Dropped."""

    type: str = Field(json_schema_extra=other_types(ChatFunctionTool, ChatCustomTool))

    def value(self) -> DroppedTool:
        return DroppedTool(self.type)


_ChatTool = Annotated[
    ChatFunctionTool | ChatCustomTool | ForeignTool,
    ByType(ChatFunctionTool, foreign=ForeignTool),
]
ChatTool = Annotated[Tool | DroppedTool, ReadAs(_ChatTool)]


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


class ForeignChoice(RequestModel):
    """A tool of another kind must be called."""

    type: str = Field(json_schema_extra=other_types(NamedToolChoice, NamedCustomChoice))

    @property
    def name(self) -> str:
        return self.type


NamedChoice = Annotated[
    NamedToolChoice | NamedCustomChoice | ForeignChoice,
    ByType(NamedToolChoice, foreign=ForeignChoice),
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

TaggedMode = Annotated[ToolMode, Tag("Mode")]
_Named = Annotated[NamedChoice, Tag("Named")]
_Allowed = Annotated[AllowedToolChoice, Tag("Allowed")]
ChatToolChoice = Annotated[TaggedMode | _Named | _Allowed, CHOICE_KIND]


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

    def value(self) -> ToolCall:
        return ToolCall(self.id, self.function.name, self.function.arguments)


class CustomCall(RequestModel):
    name: str
    input: str


class CustomToolCall(RequestModel):
    """A call of a custom tool, in a history."""

    id: str = Field("", max_length=256)
    type: Literal["custom"]
    custom: CustomCall

    def value(self) -> ToolCall:
        """The call as the model wrote it."""
        return ToolCall(self.id, self.custom.name, custom_arguments(self.custom.input))


class ForeignToolCall(RequestModel):
    """A call of a tool of another kind, in a history. What it says becomes a text."""

    model_config = ConfigDict(extra="allow")

    id: str = Field("", max_length=256)
    type: str = Field(json_schema_extra=other_types(FunctionToolCall, CustomToolCall))

    def value(self) -> "ForeignCall":
        note = foreign_note(self.type, self.model_dump(exclude={"id", "type"}))
        return ForeignCall(self.id, self.type, note)


@dataclass(frozen=True, slots=True)
class ForeignCall:
    """A call of a tool of another kind. `note` is what it says to a model, if anything."""

    id: str
    kind: str
    note: Note | None


_ToolCall = Annotated[
    FunctionToolCall | CustomToolCall | ForeignToolCall,
    ByType(FunctionToolCall, foreign=ForeignToolCall),
]
ToolCalls = Annotated[
    list[Annotated[ToolCall | ForeignCall, ReadAs(_ToolCall)]],
    Field(max_length=MAX_TOOLS, fail_fast=True),
]
