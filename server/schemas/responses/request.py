"""`POST /v1/responses`."""

from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import PydanticCustomError

from server.schemas.base import RequestModel
from server.schemas.chat import TemplateArguments
from server.schemas.common import PromptRequest, SampledRequest
from server.schemas.errors import UNSUPPORTED
from server.schemas.responses.items import MAX_ITEMS, InputItem
from server.schemas.responses.tools import ResponseToolChoice, ResponseTools

MAX_METADATA = 16  # OpenAI's, as are the lengths
MAX_INCLUDES = 64
ENCRYPTED_REASONING = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"


def _as_items(value: object) -> object:
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list):
        raise PydanticCustomError("input", "must be a string or a list of items")
    return value


def _few(metadata: object) -> object:
    if isinstance(metadata, dict) and len(metadata) > MAX_METADATA:
        message = "at most {limit} entries"
        raise PydanticCustomError("metadata", message, {"limit": MAX_METADATA})
    return metadata


def _refused(name: str) -> BeforeValidator:
    def refuse(value: object) -> object:
        message = "{name} is not supported by this server"
        raise PydanticCustomError(UNSUPPORTED, message, {"name": name})

    return BeforeValidator(refuse)


Items = Annotated[list[InputItem], Field(max_length=MAX_ITEMS, fail_fast=True)]
Input = Annotated[Items, BeforeValidator(_as_items, json_schema_input_type=str | Items)]
Metadata = Annotated[
    dict[
        Annotated[str, StringConstraints(max_length=64)],
        Annotated[str, StringConstraints(max_length=512)],
    ],
    BeforeValidator(_few),
    Field(json_schema_extra={"maxProperties": MAX_METADATA}),
]


class ReasoningOptions(RequestModel):
    effort: str | None = Field(None, max_length=32)
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None  # its name of old

    @property
    def asks_for_summary(self) -> bool:
        return bool(self.summary or self.generate_summary)


class TextFormat(RequestModel):
    """What form the text must have. Where there is a schema it is kept to, `strict` or not."""

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                {"properties": {"type": {"enum": ["text", "json_object", None]}}},
                {"properties": {"schema": {"type": "object"}}, "required": ["schema"]},
            ]
        }
    )

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str = Field("", max_length=256)
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> Self:
        if self.type == "json_schema" and self.schema_ is None:
            raise PydanticCustomError("schema", "schema is missing")
        return self


class TextOptions(RequestModel):
    format: TextFormat = Field(default_factory=TextFormat)
    verbosity: Literal["low", "medium", "high"] | None = None


class InputTokensRequest(PromptRequest):
    """All that a prompt is made of."""

    input: Input = Field(default_factory=list)
    instructions: str | None = None
    previous_response_id: str | None = Field(None, max_length=256)
    truncation: Literal["auto", "disabled"] = "disabled"

    tools: ResponseTools = Field(default_factory=list)
    tool_choice: ResponseToolChoice = "auto"
    parallel_tool_calls: bool = True
    reasoning: ReasoningOptions = Field(default_factory=ReasoningOptions)
    text: TextOptions = Field(default_factory=TextOptions)
    chat_template_kwargs: TemplateArguments = Field(default_factory=dict)

    conversation: SkipJsonSchema[Annotated[None, _refused("conversation")]] = None
    prompt: SkipJsonSchema[Annotated[None, _refused("prompt")]] = None


class ResponsesRequest(InputTokensRequest, SampledRequest):
    store: bool = True
    background: bool = False
    metadata: Metadata = Field(default_factory=dict)
    include: list[str] = Field(default_factory=list, max_length=MAX_INCLUDES, fail_fast=True)

    max_output_tokens: int | None = Field(None, ge=1)
    top_logprobs: int = Field(0, ge=0, le=20)
    max_tool_calls: int | None = Field(
        None,
        ge=1,
        description="Bounds calls of tools that OpenAI runs. There are none here: it is echoed.",
    )
    thinking_budget: int | None = Field(None, ge=0)

    user: str | None = Field(None, max_length=256)
    safety_identifier: str | None = Field(None, max_length=256)
    prompt_cache_key: str | None = Field(None, max_length=256)

    @field_validator("background")
    @classmethod
    def _stored_and_whole(cls, background: bool, info: ValidationInfo) -> bool:
        if background and not info.data.get("store", True):
            raise PydanticCustomError("background", "only allowed when store is true")
        if background and info.data.get("stream"):
            raise PydanticCustomError(UNSUPPORTED, "not supported together with stream")
        return background

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in self.include

    @property
    def wants_encrypted_reasoning(self) -> bool:
        return ENCRYPTED_REASONING in self.include
