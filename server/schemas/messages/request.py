"""`POST /v1/messages` and `/v1/messages/count_tokens`: what a client sends."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import PydanticCustomError

from engine.values.model import Temperature, TopK, TopP
from server.schemas.base import RequestModel
from server.schemas.chat import TemplateArguments
from server.schemas.common import MODELS_OWN, SPECULATE, StopTexts
from server.schemas.errors import UNSUPPORTED
from server.schemas.messages.content import Markable, Messages, Text
from server.schemas.messages.tools import ToolChoiceParam, ToolParam
from server.schemas.tools import MAX_TOOLS

MAX_SERVERS = 64


class ThinkingParam(RequestModel):
    """`adaptive` leaves it to the model's template, as saying nothing does."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = Field(None, ge=0)


class OutputFormatParam(RequestModel):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfigParam(RequestModel):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormatParam | None = None


class CountTokensRequest(Markable):
    """All that a prompt is made of."""

    model: str = Field("", max_length=256)
    messages: Messages
    system: Text = Field(default_factory=list)
    tools: Annotated[list[ToolParam], Field(max_length=MAX_TOOLS, fail_fast=True)] = Field(
        default_factory=list
    )
    tool_choice: ToolChoiceParam | None = None
    thinking: ThinkingParam | None = None
    output_config: OutputConfigParam = Field(default_factory=OutputConfigParam)
    output_format: OutputFormatParam | None = None  # what output_config.format was called at first
    mcp_servers: SkipJsonSchema[Annotated[list[Any], Field(max_length=MAX_SERVERS)]] = Field(
        default_factory=list
    )

    cache_salt: str = Field("", max_length=256)
    chat_template_kwargs: TemplateArguments = Field(default_factory=dict)

    @model_validator(mode="after")
    def _choosable(self) -> Self:
        choice, names = self.tool_choice, {tool.name for tool in self.declared_tools}
        if choice is None or choice.type in {"auto", "none"}:
            return self
        if not names:
            raise PydanticCustomError("tool_choice", "tool_choice: there are no tools to choose")
        if choice.type == "tool" and choice.name not in names:
            message = "tool_choice: tools has no '{name}'"
            raise PydanticCustomError("tool_choice", message, {"name": choice.name})
        return self

    @field_validator("mcp_servers")
    @classmethod
    def _none_of_them(cls, servers: list[Any]) -> list[Any]:
        if servers:
            raise PydanticCustomError(UNSUPPORTED, "not supported; connect to them from the client")
        return servers

    @property
    def declared_tools(self) -> list[ToolParam]:
        """Without those that Anthropic's servers would run."""
        return [tool for tool in self.tools if not tool.is_hosted]

    @property
    def marks(self) -> int:
        parts = (*self.system, *self.messages, *self.tools)
        return super().marks + sum(part.marks for part in parts)


class MessagesRequest(CountTokensRequest):
    max_tokens: int = Field(ge=0, description="With 0 the prompt is cached, and nothing answered.")
    stop_sequences: StopTexts = Field(default_factory=list)
    stream: bool = False
    temperature: Temperature | None = Field(None, description=MODELS_OWN)
    top_p: TopP | None = Field(None, description=MODELS_OWN)
    top_k: TopK | None = Field(None, description=MODELS_OWN)

    seed: int | None = Field(None, ge=-(2**63), le=2**64 - 1)
    priority: int = Field(0, ge=-1000, le=1000)
    speculate: bool = Field(True, description=SPECULATE)
