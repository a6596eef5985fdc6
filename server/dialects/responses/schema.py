"""The bodies of `POST /v1/responses` and `/v1/responses/input_tokens`: items, tools, settings."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    StringConstraints,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from server.dialects.files import FileFields
from server.dialects.openai import as_parts
from server.dialects.openai_tools import CHOICE_KIND, TaggedMode
from server.dialects.thinking_fields import ReasoningParam, ThinkingFields
from server.errors import UNSUPPORTED
from server.generation.conversation import MAX_PARTS
from server.generation.foreign_fields import Unsupported
from server.generation.request_fields import (
    ANY_OBJECT,
    PromptRequest,
    SampledRequest,
    Structure,
    StructuredRequest,
    of_schema,
)
from server.generation.tools import FUNCTION_NAME, MAX_TOOLS
from server.json_model import (
    OBJECT,
    ByType,
    RequestModel,
    any_of,
    at_most,
    of_type,
    present,
)

MAX_ITEMS = 10_000

ItemId = Annotated[str, Field(max_length=256)]


class TextContent(RequestModel):
    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: str


class RefusalContent(RequestModel):
    type: Literal["refusal"]
    refusal: str


class FileContent(FileFields):
    """A file of text."""

    type: Literal["input_file"]

    @model_validator(mode="after")
    def _is_text(self) -> Self:
        self.required_text()
        return self


class OutputFileContent(FileFields):
    """A file in a tool's output. Of one that is no text the prompt says that it cannot be shown."""

    type: Literal["input_file"]


class MediaContent(RequestModel):
    """An image in a tool's output. The prompt says that it cannot be shown."""

    type: Literal["input_image"]


MessagePart = Annotated[
    TextContent | RefusalContent | FileContent,
    ByType(TextContent, unknown="parts of type '{kind}' are not supported, only text"),
]
OutputPart = Annotated[
    TextContent | RefusalContent | OutputFileContent | MediaContent, ByType(TextContent)
]

_MessageParts = Annotated[list[MessagePart], Field(max_length=MAX_PARTS, fail_fast=True)]
_OutputParts = Annotated[list[OutputPart], Field(max_length=MAX_PARTS, fail_fast=True)]
_TextParts = Annotated[list[TextContent], Field(max_length=MAX_PARTS, fail_fast=True)]
MessageContent = Annotated[
    _MessageParts, BeforeValidator(as_parts, json_schema_input_type=str | _MessageParts)
]
OutputContent = Annotated[
    _OutputParts, BeforeValidator(as_parts, json_schema_input_type=str | _OutputParts)
]


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


NamespacedTool = Annotated[FunctionTool | CustomTool | HostedTool, ByType(HostedTool)]


class NamespaceTool(RequestModel):
    """Tools under a common name: each is called by its own name within this one."""

    type: Literal["namespace"]
    name: ToolName
    description: str | None = None
    tools: list[NamespacedTool] = Field(default_factory=list, max_length=MAX_TOOLS, fail_fast=True)


ResponseTool = Annotated[FunctionTool | CustomTool | NamespaceTool | HostedTool, ByType(HostedTool)]
ResponseTools = Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS, fail_fast=True)]


class _Item(RequestModel):
    id: ItemId | None = None


class MessageItem(_Item):
    """A message of any role."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: MessageContent


class _CallItem(_Item):
    call_id: ItemId
    name: str
    namespace: str | None = None


class FunctionCallItem(_CallItem):
    """A call that the model made. `namespace` is that of the tool, where it has one."""

    type: Literal["function_call"]
    arguments: str


class CustomToolCallItem(_CallItem):
    """A call of a custom tool, whose input is free text."""

    type: Literal["custom_tool_call"]
    input: str


class ToolOutputItem(_Item):
    """The output of a tool call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: ItemId
    output: OutputContent


class ReasoningItem(_Item):
    """Reasoning: `content`, `encrypted_content` or `summary`, the first of these that is there."""

    type: Literal["reasoning"]
    content: _TextParts = Field(default_factory=list)
    summary: _TextParts = Field(default_factory=list)
    encrypted_content: str | None = None


class AdditionalToolsItem(_Item):
    """Tools that are known from here on."""

    type: Literal["additional_tools"]
    role: Literal["developer"] = "developer"
    tools: ResponseTools


class ToolSearchCallItem(_Item):
    """A call of `tool_search`."""

    type: Literal["tool_search_call"]
    call_id: ItemId | None = None
    arguments: Any = None
    execution: Literal["server", "client"] = "server"


class ToolSearchOutputItem(_Item):
    """Tools that a `tool_search_call` has found. They are known from here on."""

    type: Literal["tool_search_output"]
    call_id: ItemId | None = None
    tools: ResponseTools
    execution: Literal["server", "client"] = "server"


class ItemReference(RequestModel):
    """An item that is stored. Clients may leave the type out."""

    type: Literal["item_reference"] = "item_reference"
    id: ItemId


def _typed(item: object) -> object:
    """An item that has an id and nothing else is a reference."""
    if isinstance(item, dict) and {key for key in item if item[key] is not None} == {"id"}:
        return {**item, "type": "item_reference"}
    return item


_Items = (
    MessageItem
    | FunctionCallItem
    | CustomToolCallItem
    | ToolOutputItem
    | ReasoningItem
    | AdditionalToolsItem
    | ToolSearchCallItem
    | ToolSearchOutputItem
)
ConversationItem = Annotated[_Items, ByType(MessageItem)]
"""An item itself."""

InputItem = Annotated[
    _Items | ItemReference,
    ByType(MessageItem, unknown="items of type '{kind}' are not supported"),
    BeforeValidator(_typed),
]
"""An item, or a reference to one."""


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


ResponseToolChoice = Annotated[
    TaggedMode | Annotated[ChosenTool, Tag("Named")] | Annotated[ChosenTools, Tag("Allowed")],
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


class TextFormat(RequestModel):
    """The required form of the text. A schema is enforced, `strict` or not."""

    model_config = any_of(of_type("text", "json_object", None), present(schema=OBJECT))

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = Field(None, max_length=256)
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> Self:
        if self.type == "json_schema" and self.schema_ is None:
            raise PydanticCustomError("schema", "schema is missing")
        return self


class TextOptions(RequestModel):
    format: TextFormat = Field(default_factory=TextFormat)
    verbosity: Literal["low", "medium", "high"] | None = None


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
