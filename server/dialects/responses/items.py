"""The items of a response's input, their content, and the tools that some of them have."""

from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BeforeValidator, ConfigDict, Field, ValidationInfo, model_validator
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import PydanticCustomError

from server.dialects.files import FileFields
from server.dialects.image_fields import ImageDetail, image_detail, image_source
from server.dialects.openai import as_parts
from server.generation.conversation import MAX_PARTS, ImagePart, ReasoningEffort, StoredImage
from server.generation.tools import FUNCTION_NAME, MAX_TOOLS
from server.json_model import (
    OBJECT,
    ByType,
    RequestModel,
    any_of,
    of_type,
    other_types,
    present,
    type_of,
)

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


STORED: dict[str, bool] = {"is_stored": True}
"""The validation context of items that this server has stored."""


class ImageContent(RequestModel):
    """An image. Of a stored item `image_digest` is the digest of its bytes."""

    type: Literal["input_image"]
    image_url: str = Field(
        "", description="A data: URL; one of http or https where the settings allow its host."
    )
    detail: ImageDetail = "auto"
    image_digest: SkipJsonSchema[str] = Field("", pattern="^([0-9a-f]{64})?$")

    @model_validator(mode="after")
    def _is_somewhere(self, info: ValidationInfo) -> Self:
        is_stored = info.context == STORED and self.image_digest
        if not self.image_url and not is_stored:
            raise PydanticCustomError("image", "image_url is missing")
        return self

    def part(self, place: str) -> ImagePart:
        """The image as a part of a message. `place` is its own in the body."""
        source = image_source(self.image_url) if self.image_url else None
        stored = StoredImage(bytes.fromhex(self.image_digest))
        return ImagePart(source or stored, image_detail(self.detail), place)


MessagePart = Annotated[
    TextContent | RefusalContent | FileContent | ImageContent,
    ByType(TextContent, unknown="parts of type '{kind}' are not supported, only text and images"),
]
OutputPart = Annotated[
    TextContent | RefusalContent | OutputFileContent | ImageContent, ByType(TextContent)
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


DEFERRED: Any = Field(
    False,
    description="Whether the model does not know it before a `tool_search_output` has it. It has "
    "an effect only with a `tool_search` that the client executes.",
)


class FunctionTool(RequestModel):
    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(
        None, description="Left out: strict, if a grammar can enforce all that `parameters` say."
    )
    defer_loading: bool = DEFERRED


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
    defer_loading: bool = DEFERRED


class BuiltInTool(RequestModel):
    """A tool whose function the API defines, and which the client runs: dropped where OpenAI's
    servers would run it.
    """

    type: Literal["apply_patch", "shell", "local_shell", "tool_search"]
    description: str | None = None
    parameters: Any = None
    execution: Literal["server", "client"] = "server"
    environment: dict[str, Any] | None = None

    @property
    def is_hosted(self) -> bool:
        match self.type:
            case "tool_search":
                return self.execution == "server"
            case "shell":
                return type_of(self.environment).startswith("container")
            case _:
                return False


class HostedTool(RequestModel):
    """Any other: run by OpenAI's servers. Dropped."""

    type: str


NamespacedTool = Annotated[FunctionTool | CustomTool | HostedTool, ByType(HostedTool)]


class NamespaceTool(RequestModel):
    """Tools under a common name: each is called by its own name within this one."""

    type: Literal["namespace"]
    name: ToolName
    description: str | None = None
    tools: list[NamespacedTool] = Field(default_factory=list, max_length=MAX_TOOLS, fail_fast=True)


ResponseTool = Annotated[
    FunctionTool | CustomTool | NamespaceTool | BuiltInTool | HostedTool, ByType(HostedTool)
]
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
    """The output of a tool call. That of a call of which the model knows nothing has no id."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: ItemId | None = None
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


class ClientCallItem(_Item):
    """A call of another tool that the client runs, in the form of its kind."""

    type: Literal["apply_patch_call", "shell_call", "local_shell_call"]
    call_id: ItemId | None = None
    operation: dict[str, Any] | None = None
    action: dict[str, Any] | None = None


class ClientOutputItem(_Item):
    """What such a call returned. That of a `local_shell_call` may have its id alone."""

    type: Literal["apply_patch_call_output", "shell_call_output", "local_shell_call_output"]
    call_id: ItemId | None = None
    output: Any = None
    status: str | None = Field(None, max_length=64)


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


class ReasoningUpdate(RequestModel):
    effort: ReasoningEffort | None = None


class TextUpdate(RequestModel):
    format: TextFormat


class ConfigurationUpdateItem(_Item):
    """The reasoning effort, and the form of the text, of the answers from here on."""

    type: Literal["configuration_update"]
    reasoning: ReasoningUpdate | None = None
    text: TextUpdate | None = None


class CompactionItem(_Item):
    """A summary of all that is before it, which this server has sealed. Others' say nothing."""

    type: Literal["compaction"]
    encrypted_content: str


class CompactionTriggerItem(_Item):
    """As the last item: the response is a summary of the conversation. Elsewhere it is skipped."""

    type: Literal["compaction_trigger"]


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
    | ClientCallItem
    | ClientOutputItem
    | ConfigurationUpdateItem
    | CompactionItem
    | CompactionTriggerItem
)


class ForeignItem(_Item):
    """An item of another kind. What it says becomes a text; what says nothing is skipped."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(json_schema_extra=other_types(*get_args(_Items), ItemReference))


ConversationItem = Annotated[_Items | ForeignItem, ByType(MessageItem, foreign=ForeignItem)]
"""An item itself."""

InputItem = Annotated[
    _Items | ForeignItem | ItemReference,
    ByType(MessageItem, foreign=ForeignItem),
    BeforeValidator(_typed),
]
"""An item, or a reference to one."""
