"""`POST /v1/chat/completions`: the request, the completion and its chunks."""

from typing import Annotated, ClassVar, Literal, NotRequired

from pydantic import Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from server.dialects.openai import ChatConversation, TextContent, UsageBody
from server.dialects.openai_logprobs import ChoiceLogprobs
from server.errors import UNSUPPORTED
from server.generation.foreign_fields import Unsupported
from server.generation.progress import ProgressBody
from server.generation.request_fields import GenerationRequest, TokenLimit
from server.json_model import RequestModel

MAX_MODALITIES = 16


class Prediction(RequestModel):
    """The expected answer, such as a file that the answer repeats with changes."""

    type: Literal["content"]
    content: TextContent

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


class CalledFunction(TypedDict):
    name: str
    arguments: str  # JSON


class ToolCallBody(TypedDict):
    id: str
    type: Literal["function"]
    function: CalledFunction


class CalledCustomTool(TypedDict):
    name: str
    input: str


class CustomToolCallBody(TypedDict):
    id: str
    type: Literal["custom"]
    custom: CalledCustomTool


class AssistantMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: NotRequired[list[ToolCallBody | CustomToolCallBody]]
    function_call: NotRequired[CalledFunction]
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]  # the same: clients read one or the other


ServedTier = Literal["default"]
"""OpenAI's tiers of service differ in price and speed. There is one here."""

ChatFinishReason = Literal["stop", "length", "repetition", "tool_calls", "function_call"]


class ChatChoice(TypedDict):
    index: int
    message: AssistantMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: ChatFinishReason


class ChatCompletion(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: UsageBody
    service_tier: NotRequired[ServedTier]  # where the request names one


class FunctionDelta(TypedDict):
    """The name comes first, whole, then slices of the arguments."""

    name: NotRequired[str]
    arguments: str


class ToolCallDelta(TypedDict):
    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


class CustomDelta(TypedDict):
    """The name comes first, then the input, whole."""

    name: NotRequired[str]
    input: str


class CustomToolCallDelta(TypedDict):
    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["custom"]]
    custom: CustomDelta


class Delta(TypedDict):
    """The part of a message that a chunk adds."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    refusal: NotRequired[None]
    tool_calls: NotRequired[list[ToolCallDelta | CustomToolCallDelta]]
    function_call: NotRequired[FunctionDelta]
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]


class ChunkChoice(TypedDict):
    index: int
    delta: Delta
    logprobs: ChoiceLogprobs | None
    finish_reason: ChatFinishReason | None


class ChatChunk(TypedDict):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    service_tier: NotRequired[ServedTier]  # where the request names one
    prompt_progress: NotRequired[ProgressBody]  # with return_progress, before the answer begins
    usage: NotRequired[UsageBody | None]  # set, to null or not, only with include_usage
