"""`POST /v1/chat/completions`: the request, the completion and its chunks."""

from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from server.dialects.openai import ChatConversation, ChoiceLogprobs, UsageBody
from server.dialects.openai_chat import Content
from server.errors import UNSUPPORTED
from server.generation.foreign_fields import Unsupported
from server.generation.request_fields import GenerationRequest, TokenLimit
from server.json_model import RequestModel, SparseModel

MAX_MODALITIES = 16


class Prediction(RequestModel):
    """The expected answer, such as a file that the answer repeats with changes."""

    type: Literal["content"]
    content: Content

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content)


Modality = Annotated[str, Field(json_schema_extra={"const": "text"})]


class ChatRequest(ChatConversation, GenerationRequest):
    EXAMPLE: ClassVar = {
        "messages": [
            {"role": "system", "content": "Answer in one sentence."},
            {"role": "user", "content": "What is a radix tree?"},
        ],
        "max_tokens": 100,
    }

    max_tokens: TokenLimit | None = None
    max_completion_tokens: TokenLimit | None = None
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)

    parallel_tool_calls: bool = True
    service_tier: str | None = Field(
        None,
        max_length=64,
        description="There is one tier: an answer that names it says `default`.",
    )
    prediction: Prediction | None = Field(
        None,
        description="Tokens are drafted from it wherever the answer goes on as it does; the answer "
        "is the same.",
    )
    modalities: list[Modality] = Field(
        default_factory=list, max_length=MAX_MODALITIES, fail_fast=True
    )

    echo: Unsupported = None
    add_special_tokens: Unsupported = None

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


class CalledFunction(BaseModel):
    name: str
    arguments: str  # JSON


class ToolCallBody(BaseModel):
    id: str
    type: Literal["function"]
    function: CalledFunction


class CalledCustomTool(BaseModel):
    name: str
    input: str


class CustomToolCallBody(BaseModel):
    id: str
    type: Literal["custom"]
    custom: CalledCustomTool


class AssistantMessage(SparseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCallBody | CustomToolCallBody] | None = None
    function_call: CalledFunction | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same: clients read one or the other


ServedTier = Literal["default"]
"""OpenAI's tiers of service differ in price and speed. There is one here."""

ChatFinishReason = Literal["stop", "length", "tool_calls", "function_call"]


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: ChatFinishReason


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: UsageBody
    service_tier: ServedTier | None = None  # where the request names one


class FunctionDelta(SparseModel):
    """The name comes first, whole, then slices of the arguments."""

    name: str | None = None
    arguments: str


class ToolCallDelta(SparseModel):
    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class CustomDelta(SparseModel):
    """The name comes first, then the input, whole."""

    name: str | None = None
    input: str


class CustomToolCallDelta(SparseModel):
    index: int
    id: str | None = None
    type: Literal["custom"] | None = None
    custom: CustomDelta


class Delta(SparseModel):
    """The part of a message that a chunk adds."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    refusal: None = None
    tool_calls: list[ToolCallDelta | CustomToolCallDelta] | None = None
    function_call: FunctionDelta | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class ChunkChoice(BaseModel):
    index: int
    delta: Delta
    logprobs: ChoiceLogprobs | None
    finish_reason: ChatFinishReason | None


class ChatChunk(BaseModel):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    service_tier: ServedTier | None = None  # where the request names one
    usage: UsageBody | None = None  # set, to null or not, only with include_usage
