"""What chat and text completions have in common on the wire."""

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from server.schemas.errors import UNSUPPORTED

MAX_STOP_CHARACTERS = 512
MAX_LOGIT_BIASES = 1024
MAX_STOP_TOKEN_IDS = 128


def encodable(text: str) -> str:
    """JSON can spell half a surrogate pair, which is no text and has no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("text", "text must be valid Unicode") from None
    return text


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


Text = Annotated[str, AfterValidator(encodable)]
StopText = Annotated[Text, StringConstraints(min_length=1, max_length=MAX_STOP_CHARACTERS)]
TokenIdText = Annotated[str, StringConstraints(pattern=r"^\d{1,9}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]


class RequestModel(BaseModel):
    """A JSON object from a client: unknown fields are accepted, and null is the same as absent."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:
        if isinstance(data, dict):
            return {key: value for key, value in data.items() if value is not None}
        return data


class StreamOptions(RequestModel):
    include_usage: bool = False


class GenerationRequest(RequestModel):
    """Fields that both kinds of completion take. Defaults are OpenAI's."""

    model: Text = Field("", max_length=256)
    n: int = Field(1, ge=1, le=128)
    stream: bool = False
    stream_options: StreamOptions | None = None

    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, le=2**31 - 1)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0, le=100)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: dict[TokenIdText, Bias] = Field(default_factory=dict, max_length=MAX_LOGIT_BIASES)
    seed: int | None = Field(None, ge=-(2**63), le=2**64 - 1)

    stop: Annotated[list[StopText], Field(max_length=4), BeforeValidator(_as_list)] = Field(
        default_factory=list
    )
    stop_token_ids: list[int] = Field(default_factory=list, max_length=MAX_STOP_TOKEN_IDS)
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0, le=2**31 - 1)
    cache_salt: Text = Field("", max_length=256)
    priority: int = Field(0, ge=-1000, le=1000)

    response_format: dict[str, Any] | None = None
    tool_choice: Any = "auto"
    tools: list[Any] = Field(default_factory=list)
    function_call: Any = "auto"
    functions: list[Any] = Field(default_factory=list)

    @field_validator("stream_options")
    @classmethod
    def _only_with_stream(
        cls, value: StreamOptions | None, info: ValidationInfo
    ) -> StreamOptions | None:
        if value is not None and not info.data.get("stream"):
            raise PydanticCustomError("stream_options", "only allowed when stream is true")
        return value

    @field_validator("response_format")
    @classmethod
    def _text_format_alone(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is not None and value.get("type") != "text":
            raise PydanticCustomError(UNSUPPORTED, 'only {{"type": "text"}} is supported')
        return value

    @field_validator("tools", "functions")
    @classmethod
    def _no_tools_yet(cls, tools: list[Any], info: ValidationInfo) -> list[Any]:
        choice = {"tools": "tool_choice", "functions": "function_call"}[info.field_name or ""]
        if tools and info.data.get(choice) != "none":
            message = "not supported; leave it out, or set {choice} to 'none'"
            raise PydanticCustomError(UNSUPPORTED, message, {"choice": choice})
        return tools

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class UsageBody(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


WireFinishReason = Literal["stop", "length"]
