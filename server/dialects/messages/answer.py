"""What `/v1/messages` sends: a message, or the events of a stream."""

from typing import Annotated, Any, Literal, TypeAlias, get_args

from pydantic import BaseModel, Field

from server.dialects.errors import MessagesError

StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]


class ThoughtTokens(BaseModel):
    thinking_tokens: int


class MessageUsage(BaseModel):
    """The prompt's tokens are the sum of the first three."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThoughtTokens


class TextBlock(BaseModel):
    type: Literal["text"]
    text: str


class ThinkingBlock(BaseModel):
    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlock(BaseModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


Block: TypeAlias = Annotated[TextBlock | ThinkingBlock | ToolUseBlock, Field(discriminator="type")]


class MessageBody(BaseModel):
    """A message. `stop_reason` is null where it has only begun."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Block]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(BaseModel):
    input_tokens: int


class MessageStart(BaseModel):
    type: Literal["message_start"]
    message: MessageBody


class Ping(BaseModel):
    type: Literal["ping"]


class ContentBlockStart(BaseModel):
    type: Literal["content_block_start"]
    index: int
    content_block: Block


class TextDelta(BaseModel):
    type: Literal["text_delta"]
    text: str


class ThinkingDelta(BaseModel):
    type: Literal["thinking_delta"]
    thinking: str


class SignatureDelta(BaseModel):
    type: Literal["signature_delta"]
    signature: str


class InputJsonDelta(BaseModel):
    """Slices of a call's input, as JSON text."""

    type: Literal["input_json_delta"]
    partial_json: str


BlockDelta: TypeAlias = Annotated[
    TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta, Field(discriminator="type")
]


class ContentBlockDelta(BaseModel):
    type: Literal["content_block_delta"]
    index: int
    delta: BlockDelta


class ContentBlockStop(BaseModel):
    type: Literal["content_block_stop"]
    index: int


class MessageEnd(BaseModel):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(BaseModel):
    """How the message ended, and what it took in all."""

    type: Literal["message_delta"]
    delta: MessageEnd
    usage: MessageUsage


class MessageStop(BaseModel):
    type: Literal["message_stop"]


MessageEvent: TypeAlias = (
    MessageStart
    | Ping
    | ContentBlockStart
    | ContentBlockDelta
    | ContentBlockStop
    | MessageDelta
    | MessageStop
    | MessagesError
)
MESSAGE_EVENTS: tuple[type[MessageEvent], ...] = get_args(MessageEvent)
