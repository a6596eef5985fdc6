"""The bodies of `POST /v1/messages` and `/v1/messages/count_tokens`."""

import re
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, model_validator
from pydantic.json_schema import JsonSchemaValue, SkipJsonSchema
from pydantic_core import PydanticCustomError

from server.dialects.messages.blocks import CacheControlled, Messages, Text
from server.dialects.messages.client_tools import ClientTool, client_tool
from server.dialects.thinking_fields import ThinkingFields
from server.generation.conversation import ReasoningEffort
from server.generation.request_fields import (
    SampledRequest,
    StopTexts,
    Structure,
    StructuredRequest,
    of_schema,
)
from server.generation.tools import FUNCTION_NAME, MAX_TOOLS
from server.json_model import (
    NULL,
    OBJECT,
    ByType,
    RequestModel,
    any_of,
    of_type,
    other_types,
    present,
    refused,
)

OWN = ("custom", "function")
"""The types of tools whose schema the client has: `function`, as OpenAI has it, needs one here."""

_NAME: JsonSchemaValue = {"type": "string", "pattern": FUNCTION_NAME}


class ToolParam(CacheControlled):
    """A tool with a schema is the client's to run. Others Anthropic runs, or has the schema of."""

    model_config = any_of(
        present(name=_NAME, input_schema=OBJECT),
        {
            "properties": {
                "type": {"type": "string", "not": {"enum": [*OWN]}},
                "input_schema": NULL,
            },
            "required": ["type"],
        },
    )

    type: str = Field("custom", max_length=64)
    name: str = Field("", max_length=256)
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool = False
    defer_loading: bool = Field(
        False, description="Whether the model does not know it before a `tool_reference` names it."
    )

    @property
    def is_hosted(self) -> bool:
        """Whether it is of a kind that Anthropic runs, or of an unknown one. Dropped."""
        return self.input_schema is None and self.type not in OWN and self.client_tool is None

    @property
    def client_tool(self) -> ClientTool | None:
        """The tool whose parameters Anthropic defines."""
        return client_tool(self.type) if self.input_schema is None else None

    @property
    def function_name(self) -> str:
        """The name of its function."""
        known = self.client_tool
        return known.name if known and not self.name else self.name

    @model_validator(mode="after")
    def _known(self) -> Self:
        if self.is_hosted:
            return self
        if self.client_tool:
            return self._named(self.function_name)
        if self.input_schema is None:
            raise PydanticCustomError("tool", "input_schema is missing")
        return self._named(self.name)

    def _named(self, name: str) -> Self:
        if not re.fullmatch(FUNCTION_NAME, name):
            message = "the name must match {pattern}"
            raise PydanticCustomError("tool", message, {"pattern": FUNCTION_NAME})
        return self


class ToolChoiceParam(RequestModel):
    model_config = any_of(of_type("auto", "any", "none"), present(name=_NAME))

    type: Literal["auto", "any", "tool", "none"]
    name: str = Field("", max_length=256)
    disable_parallel_tool_use: bool = False


MAX_SERVERS = 64

Servers = SkipJsonSchema[
    Annotated[
        list[Any],
        Field(max_length=MAX_SERVERS),
        refused("not supported; connect to them from the client"),
    ]
]


class OutputFormatParam(RequestModel):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfigParam(RequestModel):
    effort: ReasoningEffort | None = None
    format: OutputFormatParam | None = None


class InputTokensTrigger(RequestModel):
    type: Literal["input_tokens"]
    value: int = Field(ge=1)


MAX_INSTRUCTIONS = 100_000


class CompactEdit(RequestModel):
    """When the conversation is compacted: what is before the answer becomes a summary."""

    type: Literal["compact_20260112"]
    trigger: InputTokensTrigger | None = Field(
        None, description="At most and by default three quarters of the context."
    )
    pause_after_compaction: bool = False
    instructions: str | None = Field(None, max_length=MAX_INSTRUCTIONS)


class OtherEdit(RequestModel):
    """An edit of another kind, which has no effect: all that is in a prompt stays cached."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(max_length=64, json_schema_extra=other_types(CompactEdit))


MAX_EDITS = 16


class ContextEdits(RequestModel):
    edits: list[Annotated[CompactEdit | OtherEdit, ByType(foreign=OtherEdit)]] = Field(
        default_factory=list, max_length=MAX_EDITS, fail_fast=True
    )

    @property
    def compact(self) -> CompactEdit | None:
        """The edit that compacts, if there is one."""
        return next((edit for edit in self.edits if isinstance(edit, CompactEdit)), None)


class CompactionParam(RequestModel):
    """Makes the answer a summary of the conversation, and nothing else."""

    type: Literal["summarize"]
    instructions: str | None = Field(None, max_length=MAX_INSTRUCTIONS)


class CountTokensRequest(CacheControlled, ThinkingFields):
    """The fields that make a prompt."""

    EXAMPLE: ClassVar = {"messages": [{"role": "user", "content": "What is a radix tree?"}]}

    model: str = Field("", max_length=256)
    messages: Messages
    system: Text = Field(default_factory=list)
    tools: Annotated[list[ToolParam], Field(max_length=MAX_TOOLS, fail_fast=True)] = Field(
        default_factory=list
    )
    tool_choice: ToolChoiceParam | None = None
    output_config: OutputConfigParam = Field(default_factory=OutputConfigParam)
    output_format: OutputFormatParam | None = None  # what output_config.format was called at first
    mcp_servers: Servers = Field(default_factory=list)
    compaction: CompactionParam | None = None
    context_management: ContextEdits = Field(default_factory=ContextEdits)

    cache_salt: str = Field("", max_length=256)

    @model_validator(mode="after")
    def _choosable(self) -> Self:
        choice = self.tool_choice
        names = {tool.function_name for tool in self.declared_tools}
        if choice is None or choice.type in {"auto", "none"} or self.chooses_dropped:
            return self
        if not names:
            raise PydanticCustomError("tool_choice", "tool_choice: there are no tools to choose")
        if choice.type == "tool" and choice.name not in names:
            message = "tool_choice: tools has no '{name}'"
            raise PydanticCustomError("tool_choice", message, {"name": choice.name})
        return self

    def _efforts(self) -> Iterator[tuple[str, ReasoningEffort | None]]:
        yield "output_config.effort", self.output_config.effort
        yield from super()._efforts()

    @property
    def chooses_dropped(self) -> bool:
        """Whether it has to call a tool of which none is left, as hosted ones are dropped."""
        hosted = [tool for tool in self.tools if tool.is_hosted]
        match self.tool_choice:
            case ToolChoiceParam(type="any"):
                return bool(hosted) and not self.declared_tools
            case ToolChoiceParam(type="tool", name=name) if name:
                return any(tool.name == name or tool.type.startswith(name) for tool in hosted) and (
                    all(tool.function_name != name for tool in self.declared_tools)
                )
            case _:
                return False

    @property
    def declared_tools(self) -> list[ToolParam]:
        """The tools that the client runs, without those hosted by Anthropic."""
        return [tool for tool in self.tools if not tool.is_hosted]

    @property
    def cache_control_count(self) -> int:
        parts = (*self.system, *self.messages, *self.tools)
        return super().cache_control_count + sum(part.cache_control_count for part in parts)


class MessagesRequest(CountTokensRequest, SampledRequest, StructuredRequest):
    EXAMPLE: ClassVar = {
        "max_tokens": 100,
        "messages": [{"role": "user", "content": "What is a radix tree?"}],
    }

    max_tokens: int = Field(ge=0, description="With 0 the prompt is cached, and nothing answered.")
    stop_sequences: StopTexts = Field(default_factory=list)

    @model_validator(mode="after")
    def _one_compaction(self) -> Self:
        if self.compaction is not None and self.context_management.compact is not None:
            message = "compaction: not together with a compact edit of context_management"
            raise PydanticCustomError("compaction", message)
        return self

    @model_validator(mode="after")
    def _one_kind_of_stops(self) -> Self:
        if self.stop and self.stop_sequences:
            raise PydanticCustomError("stop", "give either stop_sequences or stop")
        return self

    def _structures(self) -> Iterator[Structure]:
        if format := self.output_config.format or self.output_format:
            yield "output_config.format", of_schema(format.schema_)
        yield from super()._structures()
