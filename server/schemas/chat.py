"""`POST /v1/chat/completions`."""

from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import PydanticCustomError

from server.schemas.common import (
    GenerationRequest,
    RequestModel,
    TokenLimit,
    UsageBody,
    WireFinishReason,
)
from server.schemas.errors import UNSUPPORTED

MAX_MESSAGES = 10_000
MAX_PARTS = 1000
MAX_TOOL_CALLS = 1000
MAX_MODALITIES = 16


class TextPart(RequestModel):
    """One part of a message's content. Text is the only kind that is served."""

    type: str = Field(json_schema_extra={"const": "text"})
    text: str

    @field_validator("type")
    @classmethod
    def _text_alone(cls, kind: str) -> str:
        if kind != "text":
            message = "parts of type '{kind}' are not supported, only 'text'"
            raise PydanticCustomError(UNSUPPORTED, message, {"kind": kind[:64]})
        return kind


def _as_parts(content: object) -> object:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise PydanticCustomError("content", "must be a string or a list of parts")
    return content


TextParts = Annotated[list[TextPart], Field(max_length=MAX_PARTS, fail_fast=True)]
Content = Annotated[TextParts, BeforeValidator(_as_parts, json_schema_input_type=str | TextParts)]


CONTENT_UNLESS_ASSISTANT: JsonSchemaValue = {
    "anyOf": [
        {"properties": {"role": {"const": "assistant"}}},
        {"properties": {"content": {"type": ["string", "array"]}}, "required": ["content"]},
    ]
}


class Message(RequestModel):
    model_config = ConfigDict(json_schema_extra=CONTENT_UNLESS_ASSISTANT)

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = Field(None, max_length=MAX_TOOL_CALLS, fail_fast=True)
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _content_unless_assistant(self) -> Self:
        if self.content is None and self.role != "assistant":
            message = "a message of role '{role}' needs content"
            raise PydanticCustomError("content", message, {"role": self.role})
        return self


class ChatRequest(GenerationRequest):
    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    max_tokens: TokenLimit | None = None
    max_completion_tokens: TokenLimit | None = None
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)

    modalities: list[str] = Field(default_factory=list, max_length=MAX_MODALITIES, fail_fast=True)

    @field_validator("max_tokens", "max_completion_tokens")
    @classmethod
    def _some_tokens(cls, value: int | None) -> int | None:
        if value == 0:
            raise PydanticCustomError("token_limit", "must be at least 1, or -1 for no limit")
        return value

    @field_validator("top_logprobs")
    @classmethod
    def _needs_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and not info.data.get("logprobs"):
            raise PydanticCustomError("top_logprobs", "only allowed when logprobs is true")
        return value

    @field_validator("modalities")
    @classmethod
    def _text_output_alone(cls, modalities: list[str]) -> list[str]:
        if any(modality != "text" for modality in modalities):
            raise PydanticCustomError(UNSUPPORTED, "only 'text' is supported")
        return modalities


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprobBody(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(BaseModel):
    content: list[TokenLogprobBody]
    refusal: None


class AssistantMessage(BaseModel):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: WireFinishReason


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: UsageBody


class Delta(BaseModel):
    """News of a message. Keys that are not set are not sent."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    refusal: str | None = None


class ChunkChoice(BaseModel):
    index: int
    delta: Delta
    logprobs: ChoiceLogprobs | None
    finish_reason: WireFinishReason | None


class ChatChunk(BaseModel):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: UsageBody | None = None  # set, to null or not, only with include_usage
