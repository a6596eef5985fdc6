"""The bodies of `POST /v1/messages` and `/v1/messages/count_tokens`."""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue, SkipJsonSchema
from pydantic_core import PydanticCustomError

from server.dialects.image_fields import image_source
from server.dialects.messages.client_tools import ClientTool, client_tool
from server.dialects.openai import as_parts
from server.dialects.thinking_fields import ThinkingFields
from server.errors import UNSUPPORTED
from server.generation.conversation import (
    MAX_MESSAGES,
    MAX_PARTS,
    ImageData,
    ImagePart,
    ReasoningEffort,
)
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
    type_of,
)

UNTYPED = "content blocks of this type are not supported"
BY_TYPE = ByType(
    unknown="content blocks of type '{kind}' are not supported here",
    untyped=UNTYPED,
)


class RequestPart(RequestModel):
    @property
    def cache_control_count(self) -> int:
        """The number of `cache_control` fields in it."""
        return 0


class CacheControlled(RequestPart):
    """A block that may have `cache_control`. It is counted and has no effect, because every prompt
    is cached.
    """

    cache_control: dict[str, Any] | None = None

    @property
    def cache_control_count(self) -> int:
        return int(self.cache_control is not None)


class TextBlockParam(CacheControlled):
    type: Literal["text"]
    text: str


class ThinkingBlockParam(RequestPart):
    """Reasoning of an earlier answer. Its signature is not checked."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class RedactedThinkingBlockParam(RequestPart):
    """Encrypted reasoning of another server. It is left out of the prompt."""

    type: Literal["redacted_thinking"]
    data: str = ""


class ToolUseBlockParam(CacheControlled):
    """A call that an assistant made."""

    type: Literal["tool_use"]
    id: str = Field(min_length=1, max_length=256)
    name: str = Field(min_length=1, max_length=256)
    input: dict[str, Any]


class Base64ImageSourceParam(RequestModel):
    type: Literal["base64"]
    data: str


class UrlImageSourceParam(RequestModel):
    type: Literal["url"]
    url: str


class ImageBlockParam(CacheControlled):
    """An image. Errors name the block's type in its path, as Anthropic's do: Claude Code finds the
    block by it, removes it and continues.
    """

    type: Literal["image"]
    source: Annotated[Base64ImageSourceParam | UrlImageSourceParam, Field(discriminator="type")]

    def part(self, place: str) -> ImagePart:
        """The image as a part of a message. `place` is the block's in the body."""
        source = self.source
        found = (
            ImageData(source.data)
            if isinstance(source, Base64ImageSourceParam)
            else image_source(source.url)
        )
        return ImagePart(found, place=f"{place}.image")


class PlainImageBlockParam(CacheControlled):
    """An image where there is text alone."""

    type: Literal["image"]

    @model_validator(mode="before")
    @classmethod
    def _refused(cls, data: Any) -> Any:
        raise PydanticCustomError(UNSUPPORTED, "images are not supported here, only in messages")


class TextSourceParam(RequestModel):
    type: Literal["text"]
    data: str


PlainBlock: TypeAlias = TextBlockParam | SkipJsonSchema[PlainImageBlockParam]
PlainBlocks = Annotated[
    list[Annotated[PlainBlock, BY_TYPE]],
    Field(max_length=MAX_PARTS, fail_fast=True),
]
PlainText = Annotated[
    PlainBlocks, BeforeValidator(as_parts, json_schema_input_type=str | PlainBlocks)
]


class ContentSourceParam(RequestModel):
    """Text in blocks. Images among them are refused."""

    type: Literal["content"]
    content: PlainText

    @property
    def data(self) -> str:
        return _joined(self.content)


class DocumentBlockParam(CacheControlled):
    """A document that is text. Others are refused."""

    type: Literal["document"]
    source: Annotated[TextSourceParam | ContentSourceParam, Field(discriminator="type")]
    title: str | None = None
    context: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_text(cls, data: Any) -> Any:
        if isinstance(data, dict) and type_of(data.get("source")) not in {"", "text", "content"}:
            message = "this document is not supported: of documents the model reads text alone"
            raise PydanticCustomError(UNSUPPORTED, message)
        return data

    @property
    def text(self) -> str:
        """The document's title and context, and its text."""
        return "\n".join(filter(None, (self.title, self.context, self.source.data)))


class SearchResultBlockParam(CacheControlled):
    """A text that a search found, and where."""

    type: Literal["search_result"]
    source: str
    title: str
    content: PlainBlocks

    @property
    def text(self) -> str:
        """The result's title and source, and its text."""
        return "\n".join(filter(None, (self.title, self.source, _joined(self.content))))


def _joined(blocks: Iterable[PlainBlock]) -> str:
    return "\n".join(block.text for block in blocks if isinstance(block, TextBlockParam))


TextBlock: TypeAlias = PlainBlock | DocumentBlockParam | SearchResultBlockParam
TextBlocks = Annotated[
    list[Annotated[TextBlock, BY_TYPE]],
    Field(max_length=MAX_PARTS, fail_fast=True),
]
SpokenBlock: TypeAlias = (
    TextBlockParam | ImageBlockParam | DocumentBlockParam | SearchResultBlockParam
)
Text = Annotated[TextBlocks, BeforeValidator(as_parts, json_schema_input_type=str | TextBlocks)]


class ToolReferenceBlockParam(CacheControlled):
    """Makes a declared tool known, which is described here, and no longer at the prompt's head."""

    type: Literal["tool_reference"]
    tool_name: str = Field(min_length=1, max_length=256)


class CompactionBlockParam(CacheControlled):
    """The summary of a conversation up to here; without content there is none."""

    type: Literal["compaction"]
    content: str | None = None
    tool_changes: list[Any] = Field(default_factory=list, max_length=MAX_TOOLS)


def _of_other_types(*blocks: type[RequestModel]) -> Callable[[JsonSchemaValue], None]:
    """Changes the schema of a foreign block to one of all types but those of `blocks`, and of what
    stands for text.
    """
    texts = (TextBlockParam, ImageBlockParam, DocumentBlockParam, SearchResultBlockParam)

    def change(schema: JsonSchemaValue) -> None:
        schema["properties"]["type"] |= other_types(*texts, *blocks)

    return change


class ForeignBlock(CacheControlled):
    """A block of another kind. What it says becomes a text; what says nothing is skipped."""

    model_config = ConfigDict(extra="allow")

    type: str


class ForeignResultBlockParam(ForeignBlock):
    """In a tool's result."""

    model_config = ConfigDict(json_schema_extra=_of_other_types(ToolReferenceBlockParam))


ResultBlock: TypeAlias = SpokenBlock | ToolReferenceBlockParam | ForeignResultBlockParam
ResultBlocks = Annotated[
    list[Annotated[ResultBlock, ByType(foreign=ForeignResultBlockParam, untyped=UNTYPED)]],
    Field(max_length=MAX_PARTS, fail_fast=True),
]
Result = Annotated[
    ResultBlocks, BeforeValidator(as_parts, json_schema_input_type=str | ResultBlocks)
]


class ToolResultBlockParam(CacheControlled):
    type: Literal["tool_result"]
    tool_use_id: str = Field(min_length=1, max_length=256)
    content: Result = Field(default_factory=list)
    is_error: bool = False

    @property
    def cache_control_count(self) -> int:
        return super().cache_control_count + sum(
            block.cache_control_count for block in self.content
        )


class ForeignBlockParam(ForeignBlock):
    """In a message."""

    model_config = ConfigDict(
        json_schema_extra=_of_other_types(
            ThinkingBlockParam,
            RedactedThinkingBlockParam,
            ToolUseBlockParam,
            ToolResultBlockParam,
            CompactionBlockParam,
        )
    )


BlockParam: TypeAlias = (
    SpokenBlock
    | ThinkingBlockParam
    | RedactedThinkingBlockParam
    | ToolUseBlockParam
    | ToolResultBlockParam
    | CompactionBlockParam
    | ForeignBlockParam
)
Blocks = Annotated[
    list[Annotated[BlockParam, ByType(foreign=ForeignBlockParam, untyped=UNTYPED)]],
    Field(max_length=MAX_PARTS, fail_fast=True),
]
Content = Annotated[Blocks, BeforeValidator(as_parts, json_schema_input_type=str | Blocks)]


class MessageParam(RequestPart):
    role: Literal["user", "assistant", "system"]
    content: Content

    @property
    def cache_control_count(self) -> int:
        return sum(block.cache_control_count for block in self.content)


Messages = Annotated[
    list[MessageParam], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
]

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
    def _one_kind_of_stops(self) -> Self:
        if self.stop and self.stop_sequences:
            raise PydanticCustomError("stop", "give either stop_sequences or stop")
        return self

    def _structures(self) -> Iterator[Structure]:
        if format := self.output_config.format or self.output_format:
            yield "output_config.format", of_schema(format.schema_)
        yield from super()._structures()
