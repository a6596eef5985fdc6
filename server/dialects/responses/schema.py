"""The bodies of `POST /v1/responses` and `/v1/responses/input_tokens`."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    Tag,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError

from server.dialects.openai_tools import CHOICE_KIND, TaggedMode
from server.dialects.responses.items import InputItem, ResponseTools, TextFormat, ToolName
from server.dialects.thinking_fields import ReasoningParam, ThinkingFields
from server.errors import UNSUPPORTED
from server.generation.foreign_fields import Unsupported
from server.generation.request_fields import (
    ANY_OBJECT,
    PrioritizedRequest,
    PromptCacheOptions,
    PromptRequest,
    SampledRequest,
    Structure,
    StructuredRequest,
    of_schema,
)
from server.generation.tools import MAX_TOOLS
from server.json_model import (
    ByType,
    RequestModel,
    at_most,
    other_types,
)

MAX_ITEMS = 10_000


class ChosenTool(RequestModel):
    """One tool by its name."""

    type: Literal["function", "custom"]
    name: ToolName
    namespace: ToolName | None = None


class ChosenKind(RequestModel):
    """The tools of one kind, as `apply_patch` or `web_search`."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(max_length=64, json_schema_extra=other_types(ChosenTool))


_Chosen = Annotated[ChosenTool | ChosenKind, ByType(ChosenKind)]


class ChosenTools(RequestModel):
    """Only these may be called; all tools are in the prompt."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"] = "auto"
    tools: list[_Chosen] = Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)


ResponseToolChoice = Annotated[
    TaggedMode | Annotated[_Chosen, Tag("Named")] | Annotated[ChosenTools, Tag("Allowed")],
    CHOICE_KIND,
]

MAX_METADATA = 16  # OpenAI's, as are the lengths
MAX_INCLUDES = 64
ENCRYPTED_REASONING = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"
Includable = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]


def _as_items(value: object) -> object:
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list):
        raise PydanticCustomError("input", "must be a string or a list of items")
    return value


Items = Annotated[list[InputItem], Field(max_length=MAX_ITEMS, fail_fast=True)]
Input = Annotated[Items, BeforeValidator(_as_items, json_schema_input_type=str | Items)]
Metadata = Annotated[
    dict[
        Annotated[str, StringConstraints(max_length=64)],
        Annotated[str, StringConstraints(max_length=512)],
    ],
    at_most(MAX_METADATA),
    Field(json_schema_extra={"maxProperties": MAX_METADATA}),
]


class ReasoningOptions(ReasoningParam):
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None  # summary's old name

    @property
    def wants_summary(self) -> bool:
        return bool(self.summary or self.generate_summary)


class TextOptions(RequestModel):
    format: TextFormat = Field(default_factory=TextFormat)
    verbosity: Literal["low", "medium", "high"] | None = None


class ContextManagement(RequestModel):
    """When the conversation is compacted: what is before the answer becomes a summary."""

    type: Literal["compaction"]
    compact_threshold: int | None = Field(
        None,
        ge=1,
        description="Tokens of the prompt, at most and by default three quarters of the context.",
    )


class InputTokensRequest(PromptRequest, ThinkingFields):
    """The fields that make a prompt."""

    EXAMPLE: ClassVar = {"input": "What is a radix tree?"}

    input: Input = Field(default_factory=list)
    instructions: str | None = None
    previous_response_id: str | None = Field(None, max_length=256)
    truncation: Literal["auto", "disabled"] = "disabled"

    tools: ResponseTools = Field(default_factory=list)
    tool_choice: ResponseToolChoice = "auto"
    parallel_tool_calls: bool = True
    reasoning: ReasoningOptions = Field(default_factory=ReasoningOptions)
    text: TextOptions = Field(default_factory=TextOptions)

    conversation: Unsupported = None
    prompt: Unsupported = None


class CompactRequest(InputTokensRequest, PrioritizedRequest):
    """A conversation that is compacted. Without tools, instructions and reasoning it has those of
    the response that it continues, so that its prompt is cached.
    """

    EXAMPLE: ClassVar = {"input": "What is a radix tree?"}

    prompt_cache_key: str | None = Field(None, max_length=256)
    prompt_cache_options: PromptCacheOptions = Field(default_factory=PromptCacheOptions)


class ResponsesRequest(InputTokensRequest, SampledRequest, StructuredRequest):
    EXAMPLE: ClassVar = {"input": "What is a radix tree?", "max_output_tokens": 100}

    store: bool = True
    background: bool = False
    metadata: Metadata = Field(default_factory=dict)
    include: list[Includable] = Field(
        default_factory=list,
        max_length=MAX_INCLUDES,
        fail_fast=True,
        description="Of what OpenAI can include, answers here have reasoning and "
        "log-probabilities; the rest is of tools that OpenAI runs.",
    )

    context_management: list[ContextManagement] = Field(default_factory=list, max_length=1)
    max_output_tokens: int | None = Field(None, ge=1)
    top_logprobs: int = Field(0, ge=0, le=20)
    max_tool_calls: int | None = Field(
        None,
        ge=1,
        description="Bounds calls of tools that OpenAI runs. There are none here: it is echoed.",
    )

    user: str | None = Field(None, max_length=256)
    safety_identifier: str | None = Field(None, max_length=256)
    prompt_cache_key: str | None = Field(None, max_length=256)

    @field_validator("background")
    @classmethod
    def _stored_and_whole(cls, background: bool, info: ValidationInfo) -> bool:
        if background and not info.data.get("store", True):
            raise PydanticCustomError("background", "only allowed when store is true")
        if background and info.data.get("stream"):
            raise PydanticCustomError(UNSUPPORTED, "not supported together with stream")
        return background

    def _structures(self) -> Iterator[Structure]:
        if self.text.format.type != "text":
            schema = self.text.format.schema_
            yield "text.format", of_schema(ANY_OBJECT if schema is None else schema)
        yield from super()._structures()

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in self.include

    @property
    def wants_encrypted_reasoning(self) -> bool:
        return ENCRYPTED_REASONING in self.include
