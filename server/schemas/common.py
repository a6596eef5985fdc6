"""What chat and text completions have in common on the wire."""

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    StringConstraints,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

from server.schemas.errors import UNSUPPORTED

NULL: JsonSchemaValue = {"type": "null"}
NO_LIMIT = -1
"""A number of tokens, as LM Studio spells it."""
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 512
MAX_STOP_CHARACTERS_IN_ALL = 4096  # each is looked for in every character of every answer
MAX_LOGIT_BIASES = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_TOOLS = 1024


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _few(biases: object) -> object:
    """A dict has no `fail_fast`: counted first, it cannot make an error of each of its keys."""
    if isinstance(biases, dict) and len(biases) > MAX_LOGIT_BIASES:
        message = "at most {limit} entries"
        raise PydanticCustomError("logit_bias", message, {"limit": MAX_LOGIT_BIASES})
    return biases


StopText = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_CHARACTERS)]
StopTexts = Annotated[list[StopText], Field(max_length=MAX_STOPS, fail_fast=True)]
TokenId = Annotated[int, Field(ge=0)]
TokenIdText = Annotated[str, StringConstraints(pattern="^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
Biases = Annotated[
    dict[TokenIdText, Bias],
    BeforeValidator(_few),
    Field(json_schema_extra={"maxProperties": MAX_LOGIT_BIASES, "additionalProperties": False}),
]
AnyList = Annotated[list[Any], Field(max_length=MAX_TOOLS)]
TokenLimit = Annotated[int, Field(ge=NO_LIMIT)]


class RequestModel(BaseModel):
    """A JSON object from a client: unknown fields are accepted, and null is the same as absent.

    What a client can make long stops at the first error, and is counted before it is looked at:
    pydantic would make an error of each item of a list.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:
        if isinstance(data, dict):
            return {key: value for key, value in data.items() if value is not None}
        return data

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """The same in the schema: what may be absent may be null."""
        schema = handler(core_schema)
        model = handler.resolve_ref_schema(schema)
        for name, field in model["properties"].items():
            if name not in model.get("required", ()):
                model["properties"][name] = _nullable(field)
        return schema


def _nullable(schema: JsonSchemaValue) -> JsonSchemaValue:
    if NULL in schema.get("anyOf", ()):
        return schema
    about: JsonSchemaValue = {
        name: schema.pop(name) for name in ("title", "default") if name in schema
    }
    return {"anyOf": [*schema.get("anyOf", [schema]), NULL], **about}


class StreamOptions(RequestModel):
    include_usage: bool = False


class GenerationRequest(RequestModel):
    """Fields that both kinds of completion take. Defaults are OpenAI's."""

    model: str = Field("", max_length=256)
    n: int = Field(1, ge=1, le=128)
    stream: bool = False
    stream_options: StreamOptions | None = None

    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, ge=0, le=1)
    top_k: int = Field(0, ge=-1, le=2**31 - 1)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: Biases = Field(default_factory=dict)
    seed: int | None = Field(None, ge=-(2**63), le=2**64 - 1)

    stop: Annotated[
        StopTexts, BeforeValidator(_as_list, json_schema_input_type=StopText | StopTexts)
    ] = Field(default_factory=list)
    stop_token_ids: list[TokenId] = Field(
        default_factory=list, max_length=MAX_STOP_TOKEN_IDS, fail_fast=True
    )
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0, le=2**31 - 1)
    cache_salt: str = Field("", max_length=256)
    priority: int = Field(0, ge=-1000, le=1000)

    response_format: dict[str, Any] | None = None
    tool_choice: Any = "auto"
    tools: AnyList = Field(default_factory=list)
    function_call: Any = "auto"
    functions: AnyList = Field(default_factory=list)

    @field_validator("stream_options")
    @classmethod
    def _only_with_stream(
        cls, value: StreamOptions | None, info: ValidationInfo
    ) -> StreamOptions | None:
        if value is not None and not info.data.get("stream"):
            raise PydanticCustomError("stream_options", "only allowed when stream is true")
        return value

    @field_validator("stop")
    @classmethod
    def _few_characters(cls, stop: list[str]) -> list[str]:
        if sum(map(len, stop)) > MAX_STOP_CHARACTERS_IN_ALL:
            message = "at most {limit} characters in all"
            raise PydanticCustomError("stop", message, {"limit": MAX_STOP_CHARACTERS_IN_ALL})
        return stop

    @field_validator("response_format")
    @classmethod
    def _text_format_alone(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is not None and value.get("type") != "text":
            raise PydanticCustomError(UNSUPPORTED, 'only {"type": "text"} is supported')
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
