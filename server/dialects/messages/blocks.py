"""Messages and their content blocks in the bodies of `/v1/messages`."""

from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, ConfigDict, Field, model_validator
from pydantic.json_schema import JsonSchemaValue, SkipJsonSchema
from pydantic_core import PydanticCustomError

from server.dialects.image_fields import image_source
from server.dialects.openai import as_parts
from server.errors import UNSUPPORTED
from server.generation.conversation import MAX_MESSAGES, MAX_PARTS, ImageData, ImagePart
from server.generation.tools import MAX_TOOLS
from server.json_model import ByType, RequestModel, other_types, type_of

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


class CacheControl(RequestModel):
    """A mark up to which a prompt is to be cached, and for how long at least."""

    ttl: Literal["5m", "1h"] | None = None


class CacheControlled(RequestPart):
    """A block that may have `cache_control`. It is counted and has no effect, because every prompt
    is cached.
    """

    cache_control: CacheControl | None = None

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
    """The summary of the conversation up to here, which stands for it; without content there is
    none.
    """

    type: Literal["compaction"]
    content: str | None = None
    signature: str = Field("", description="This server's own is checked, and others are not.")
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
