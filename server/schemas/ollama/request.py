"""What Ollama's clients send: `POST /api/chat`, `/api/generate` and the rest."""

from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue, SkipJsonSchema
from pydantic_core import PydanticCustomError

from engine.values.model import MinP, RepetitionPenalty, Temperature, TopK, TopP
from server.schemas.base import RequestModel
from server.schemas.chat import MAX_MESSAGES
from server.schemas.common import MODELS_OWN, StopTexts
from server.schemas.errors import UNSUPPORTED
from server.schemas.ollama.keep_alive import KeepAlive
from server.schemas.tools import MAX_TOOLS, ChatFunctionTool

MAX_IMAGES = 64
MAX_RAW_LOGPROBS = 5  # as of other text completions
MAX_CONTEXT = 1 << 20

Images = SkipJsonSchema[Annotated[list[Any], Field(max_length=MAX_IMAGES)]]
Effort = Literal["low", "medium", "high", "max"]


def _think(value: object) -> object:
    if isinstance(value, bool) or (isinstance(value, str) and value in get_args(Effort)):
        return value
    efforts = ", ".join(map(repr, get_args(Effort)))
    raise PydanticCustomError(
        "think", "must be true, false or one of {efforts}", {"efforts": efforts}
    )


Think = Annotated[bool | Effort, BeforeValidator(_think)]


def _role(value: object) -> object:
    """As Ollama reads it: in any case."""
    return value.lower() if isinstance(value, str) else value


Role = Annotated[
    Literal["system", "developer", "user", "assistant", "tool"], BeforeValidator(_role)
]
Format = Literal["", "json"] | dict[str, Any]
ModelName = Annotated[str, Field(max_length=256)]


class OllamaOptions(RequestModel):
    """What is honoured of them. Others are about how Ollama loads a model, or samplers that are not
    here, and change nothing.
    """

    num_predict: int | None = Field(None, ge=-2, description="Below 1: no limit.")
    temperature: Temperature | None = Field(None, description=MODELS_OWN)
    top_p: TopP | None = Field(None, description=MODELS_OWN)
    top_k: TopK | None = Field(None, description=MODELS_OWN)
    min_p: MinP | None = Field(None, description=MODELS_OWN)
    repeat_penalty: RepetitionPenalty | None = Field(None, description=MODELS_OWN)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    seed: int | None = Field(None, ge=-(2**63), le=2**64 - 1, description="Below 0: any.")
    stop: StopTexts = Field(default_factory=list)


class OllamaAsking(RequestModel):
    """What chats and prompts have in common."""

    model: ModelName = ""
    stream: bool = True
    format: Format = ""
    options: OllamaOptions = Field(default_factory=OllamaOptions)
    think: Think | None = None
    keep_alive: KeepAlive | None = None
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    cache_salt: str = Field("", max_length=256)

    @property
    def n_logprobs(self) -> int | None:
        """How many alternatives of each token; None: no logprobs."""
        return self.top_logprobs if self.logprobs else None


def _refused_images(images: list[Any]) -> list[Any]:
    if images:
        raise PydanticCustomError(UNSUPPORTED, "this model takes none")
    return images


class OllamaCalledFunction(RequestModel):
    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class OllamaToolCallParam(RequestModel):
    """A call that an assistant made, in a history. Clients may have lost its id."""

    id: str = Field("", max_length=256)
    function: OllamaCalledFunction


class OllamaMessageParam(RequestModel):
    role: Role
    content: str = ""
    thinking: str | None = None
    images: Images = Field(default_factory=list)
    tool_calls: Annotated[
        list[OllamaToolCallParam], Field(max_length=MAX_TOOLS, fail_fast=True)
    ] = Field(default_factory=list)
    tool_name: str | None = Field(None, max_length=256)
    tool_call_id: str | None = Field(None, max_length=256)

    @field_validator("images")
    @classmethod
    def _no_images(cls, images: list[Any]) -> list[Any]:
        return _refused_images(images)


class OllamaChatRequest(OllamaAsking):
    messages: list[OllamaMessageParam] = Field(
        default_factory=list,
        max_length=MAX_MESSAGES,
        fail_fast=True,
        description="Without any the model is loaded, and nothing is answered.",
    )
    tools: Annotated[list[ChatFunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)] = Field(
        default_factory=list
    )


class OllamaGenerateRequest(OllamaAsking):
    prompt: str = Field("", description="Without one the model is loaded, and nothing is answered.")
    system: str = ""
    raw: bool = Field(False, description="The prompt as it is, without the chat template.")
    images: Images = Field(default_factory=list)
    suffix: SkipJsonSchema[str] = ""
    template: SkipJsonSchema[str] = ""
    context: SkipJsonSchema[Annotated[list[int], Field(max_length=MAX_CONTEXT, fail_fast=True)]] = (
        Field(default_factory=list)
    )

    @field_validator("raw")
    @classmethod
    def _few_logprobs(cls, raw: bool, info: ValidationInfo) -> bool:
        if raw and info.data.get("top_logprobs", 0) > MAX_RAW_LOGPROBS:
            message = "top_logprobs is at most {limit} with it"
            raise PydanticCustomError("raw", message, {"limit": MAX_RAW_LOGPROBS})
        return raw

    @field_validator("images")
    @classmethod
    def _no_images(cls, images: list[Any]) -> list[Any]:
        return _refused_images(images)

    @field_validator("suffix")
    @classmethod
    def _no_suffix(cls, suffix: str) -> str:
        if suffix:
            raise PydanticCustomError(UNSUPPORTED, "inserting text is not supported")
        return suffix

    @field_validator("template")
    @classmethod
    def _models_own_template(cls, template: str) -> str:
        if template:
            raise PydanticCustomError(UNSUPPORTED, "the model's own is the only one")
        return template

    @field_validator("context")
    @classmethod
    def _no_context(cls, context: list[int]) -> list[int]:
        if context:
            raise PydanticCustomError(UNSUPPORTED, "send the conversation to /api/chat instead")
        return context


class OllamaShowRequest(RequestModel):
    """The name of a model. `name` is what the field was called at first."""

    name: ModelName = ""
    model: ModelName = ""

    @property
    def named(self) -> str:
        return self.model or self.name


NAMED: JsonSchemaValue = {
    "anyOf": [
        {"properties": {name: {"type": "string", "minLength": 1}}, "required": [name]}
        for name in ("model", "name")
    ]
}


class OllamaModelRequest(OllamaShowRequest):
    """The same where there must be one."""

    model_config = ConfigDict(json_schema_extra=NAMED)

    @model_validator(mode="after")
    def _has_a_name(self) -> Self:
        if not self.named:
            raise PydanticCustomError("model", "model is missing")
        return self


class OllamaPullRequest(OllamaModelRequest):
    stream: bool = True
