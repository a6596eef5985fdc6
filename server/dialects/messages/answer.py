"""What `/v1/messages` sends: a message, or the events of a stream."""

from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, Field

from server.dialects.errors import MessagesError
from server.json_model import wire_event

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


class MessageEnd(BaseModel):
    stop_reason: StopReason
    stop_sequence: str | None


_DELTAS = (
    wire_event("TextDelta", "text_delta", text=str),
    wire_event("ThinkingDelta", "thinking_delta", thinking=str),
    wire_event("SignatureDelta", "signature_delta", signature=str),
    wire_event(
        "InputJsonDelta",
        "input_json_delta",
        about="Slices of a call's input, as JSON text.",
        partial_json=str,
    ),
)
_DELTA: Any = Annotated[reduce(or_, _DELTAS), Field(discriminator="type")]

MESSAGE_EVENTS: Sequence[type[BaseModel]] = (
    wire_event("MessageStart", "message_start", message=MessageBody),
    wire_event("Ping", "ping"),
    wire_event("ContentBlockStart", "content_block_start", index=int, content_block=Block),
    wire_event("ContentBlockDelta", "content_block_delta", index=int, delta=_DELTA),
    wire_event("ContentBlockStop", "content_block_stop", index=int),
    wire_event(
        "MessageDelta",
        "message_delta",
        about="How the message ended, and what it took in all.",
        delta=MessageEnd,
        usage=MessageUsage,
    ),
    wire_event("MessageStop", "message_stop"),
    MessagesError,
)
