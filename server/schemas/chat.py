"""`POST /v1/chat/completions`."""

import json
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from server.schemas.common import (
    GenerationRequest,
    RequestModel,
    Text,
    UsageBody,
    WireFinishReason,
    encodable,
)
from server.schemas.errors import UNSUPPORTED


class TextPart(RequestModel):
    """One part of a message's content. Text is the only kind that is served."""

    type: Text
    text: Text

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


class Message(RequestModel):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[list[TextPart], BeforeValidator(_as_parts)] | None = None
    name: Text | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: Text | None = None

    @field_validator("tool_calls")
    @classmethod
    def _encodable(cls, calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
        encodable(json.dumps(calls, ensure_ascii=False))
        return calls

    @model_validator(mode="after")
    def _content_unless_assistant(self) -> Self:
        if self.content is None and self.role != "assistant":
            message = "a message of role '{role}' needs content"
            raise PydanticCustomError("content", message, {"role": self.role})
        return self


class ChatRequest(GenerationRequest):
    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)

    modalities: list[str] = Field(default_factory=list)

    @field_validator("top_logprobs")
    @classmethod
    def _needs_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and not info.data.get("logprobs"):
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
