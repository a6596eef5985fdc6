"""The conversation of a request: `messages` and `system`."""

from collections.abc import Iterable
from typing import Annotated, Any, Literal, TypeAlias, get_args

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import PydanticCustomError

from server.schemas.base import RequestModel, type_of
from server.schemas.chat import MAX_MESSAGES, MAX_PARTS, as_parts
from server.schemas.errors import UNSUPPORTED


def _type_of(block: object) -> object:
    return block.get("type") if isinstance(block, dict) else None


BY_TYPE = Discriminator(
    _type_of,
    custom_error_type=UNSUPPORTED,
    custom_error_message="content blocks of this type are not supported",
)


def _member_of(blocks: object) -> BeforeValidator:
    """Refuse a block whose type has no `Tag` in the union `blocks`, and name the type: the
    discriminator's own error cannot.
    """
    types = {
        tag.tag for block in get_args(blocks) for tag in get_args(block) if isinstance(tag, Tag)
    }

    def check(block: object) -> object:
        kind = _type_of(block)
        if isinstance(kind, str) and kind not in types:
            message = "content blocks of type '{kind}' are not supported here"
            raise PydanticCustomError(UNSUPPORTED, message, {"kind": kind[:64]})
        return block

    return BeforeValidator(check)


class RequestPart(RequestModel):
    @property
    def marks(self) -> int:
        """The number of `cache_control` fields in it."""
        return 0


class Markable(RequestPart):
    """What may have `cache_control`. Everything is cached, so it is counted and has no effect."""

    cache_control: dict[str, Any] | None = None

    @property
    def marks(self) -> int:
        return int(self.cache_control is not None)


class TextBlockParam(Markable):
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


class ToolUseBlockParam(Markable):
    """A call that an assistant made."""

    type: Literal["tool_use"]
    id: str = Field(min_length=1, max_length=256)
    name: str = Field(min_length=1, max_length=256)
    input: dict[str, Any]


def _text_alone() -> PydanticCustomError:
    return PydanticCustomError(UNSUPPORTED, "not supported; the model reads text alone")


class ImageBlockParam(Markable):
    """Its type is part of the place that an error names, as in Anthropic's own: by that Claude Code
    finds the block, takes it out and goes on.
    """

    type: Literal["image"]

    @model_validator(mode="before")
    @classmethod
    def _refused(cls, data: Any) -> Any:
        raise _text_alone()


class TextSourceParam(RequestModel):
    type: Literal["text"]
    data: str


TaggedText: TypeAlias = Annotated[TextBlockParam, Tag("text")]
TaggedImage: TypeAlias = Annotated[SkipJsonSchema[ImageBlockParam], Tag("image")]
PlainBlock: TypeAlias = TaggedText | TaggedImage
PlainBlocks = Annotated[
    list[Annotated[PlainBlock, BY_TYPE, _member_of(PlainBlock)]],
    Field(max_length=MAX_PARTS, fail_fast=True),
]
PlainText = Annotated[
    PlainBlocks, BeforeValidator(as_parts, json_schema_input_type=str | PlainBlocks)
]


class ContentSourceParam(RequestModel):
    """Text in blocks. Images among them are refused, as everywhere."""

    type: Literal["content"]
    content: PlainText

    @property
    def data(self) -> str:
        return _joined(self.content)


class DocumentBlockParam(Markable):
    """A document that is text. Others are refused as images are."""

    type: Literal["document"]
    source: Annotated[TextSourceParam | ContentSourceParam, Field(discriminator="type")]
    title: str | None = None
    context: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_text(cls, data: Any) -> Any:
        if isinstance(data, dict) and type_of(data.get("source")) not in {"", "text", "content"}:
            raise _text_alone()
        return data

    @property
    def text(self) -> str:
        """The document's title and context, and its text."""
        return "\n".join(filter(None, (self.title, self.context, self.source.data)))


class SearchResultBlockParam(Markable):
    """A text that a search found, and where."""

    type: Literal["search_result"]
    source: str
    title: str
    content: PlainBlocks

    @property
    def text(self) -> str:
        """The result's title and source, and its text."""
        return "\n".join(filter(None, (self.title, self.source, _joined(self.content))))


def _joined(blocks: Iterable[TextBlockParam | ImageBlockParam]) -> str:
    return "\n".join(block.text for block in blocks if isinstance(block, TextBlockParam))


TextBlock: TypeAlias = (
    TaggedText
    | TaggedImage
    | Annotated[DocumentBlockParam, Tag("document")]
    | Annotated[SearchResultBlockParam, Tag("search_result")]
)
TextBlocks = Annotated[
    list[Annotated[TextBlock, BY_TYPE, _member_of(TextBlock)]],
    Field(max_length=MAX_PARTS, fail_fast=True),
]
Text = Annotated[TextBlocks, BeforeValidator(as_parts, json_schema_input_type=str | TextBlocks)]


class ToolResultBlockParam(Markable):
    type: Literal["tool_result"]
    tool_use_id: str = Field(min_length=1, max_length=256)
    content: Text = Field(default_factory=list)
    is_error: bool = False

    @property
    def marks(self) -> int:
        return super().marks + sum(block.marks for block in self.content)


BlockParam: TypeAlias = (
    TextBlock
    | Annotated[ThinkingBlockParam, Tag("thinking")]
    | Annotated[RedactedThinkingBlockParam, Tag("redacted_thinking")]
    | Annotated[ToolUseBlockParam, Tag("tool_use")]
    | Annotated[ToolResultBlockParam, Tag("tool_result")]
)
Blocks = Annotated[
    list[Annotated[BlockParam, BY_TYPE, _member_of(BlockParam)]],
    Field(max_length=MAX_PARTS, fail_fast=True),
]
Content = Annotated[Blocks, BeforeValidator(as_parts, json_schema_input_type=str | Blocks)]


class MessageParam(RequestPart):
    role: Literal["user", "assistant", "system"]
    content: Content

    @property
    def marks(self) -> int:
        return sum(block.marks for block in self.content)


Messages = Annotated[
    list[MessageParam], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
]
