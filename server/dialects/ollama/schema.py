"""The bodies and answers of Ollama's `/api` routes."""

import math
import re
from datetime import datetime, timedelta
from typing import Annotated, Any, ClassVar, Literal, NotRequired, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    PlainValidator,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue, SkipJsonSchema
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from engine.values.model import MinP, RepetitionPenalty, Temperature, TopK, TopP
from server.dialects.openai_logprobs import TokenLogprobBody
from server.dialects.openai_tools import ChatTool
from server.dialects.thinking_fields import ThinkingFields
from server.errors import UNSUPPORTED
from server.generation.conversation import MAX_IMAGES, MAX_MESSAGES
from server.generation.pooling import MAX_INPUTS
from server.generation.progress import ProgressBody
from server.generation.request_fields import (
    MODELS_OWN,
    RETURN_PROGRESS,
    ModelsTemplate,
    NoSuffix,
    PrewarmRequest,
    StopTexts,
    StructuredRequest,
)
from server.generation.sampler_fields import SamplerFields
from server.generation.tools import MAX_TOOLS
from server.json_model import RequestModel, any_of, present, refused

UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}

_PART = r"(\d+(?:\.\d+)?)(h|ms|m|us|µs|ns|s)"
_DURATION = re.compile(rf"(-?)((?:{_PART})+)")
_NUMBER = re.compile(r"-?\d+(\.\d+)?")
_MOST_SECONDS = timedelta.max.total_seconds()


def _seconds(value: object) -> float:
    """A number of seconds, or a duration in Go's notation; a negative one is infinite."""
    if isinstance(value, str):
        value = _read(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        message = "must be a number of seconds or a duration such as '5m' or '1h30m', or -1"
        raise PydanticCustomError("keep_alive", message)
    return math.inf if value < 0 or value >= _MOST_SECONDS else float(value)


def _read(text: str) -> float | None:
    if len(text) > 64:
        return None
    if _NUMBER.fullmatch(text):
        return float(text)
    if not (found := _DURATION.fullmatch(text)):
        return None
    seconds = sum(float(number) * UNITS[unit] for number, unit in re.findall(_PART, found[2]))
    return -seconds if found[1] else seconds


KeepAlive = Annotated[
    float,
    PlainValidator(_seconds, json_schema_input_type=float | str),
]
"""Seconds; infinite where the model is to stay."""

MAX_RAW_LOGPROBS = 5  # as of other text completions
MAX_CONTEXT = 1 << 20

Images = Annotated[
    list[str],
    Field(max_length=MAX_IMAGES, fail_fast=True, description="Each in base64, or as a URL."),
]
Context = SkipJsonSchema[
    Annotated[
        list[int],
        Field(max_length=MAX_CONTEXT, fail_fast=True),
        refused("send the conversation to /api/chat instead"),
    ]
]


def _role(value: object) -> object:
    """The role in lower case: Ollama accepts any case."""
    return value.lower() if isinstance(value, str) else value


Role = Annotated[
    Literal["system", "developer", "user", "assistant", "tool"], BeforeValidator(_role)
]
ModelName = Annotated[str, Field(max_length=256)]


class OllamaOptions(SamplerFields):
    """The honoured options, and the samplers that are refused. Others, about loading in Ollama,
    have no effect.
    """

    num_ctx: int | None = Field(
        None, description="The context is the model's; a longer one is refused."
    )
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


class OllamaGenerationRequest(StructuredRequest, ThinkingFields, PrewarmRequest):
    """The common fields of chats and prompts."""

    model: ModelName = ""
    stream: bool = True
    options: OllamaOptions = Field(default_factory=OllamaOptions)
    keep_alive: KeepAlive | None = None
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    return_progress: bool = Field(False, description=RETURN_PROGRESS)
    cache_salt: str = Field("", max_length=256)

    @property
    def n_logprobs(self) -> int | None:
        """The number of alternatives for each token; None: no logprobs."""
        return self.top_logprobs if self.logprobs else None


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


class OllamaChatRequest(OllamaGenerationRequest):
    EXAMPLE: ClassVar = {
        "messages": [{"role": "user", "content": "What is a radix tree?"}],
        "stream": False,
        "options": {"num_predict": 100},
    }

    messages: list[OllamaMessageParam] = Field(
        default_factory=list,
        max_length=MAX_MESSAGES,
        fail_fast=True,
        description="Without any the model is loaded, and nothing is answered.",
    )
    tools: Annotated[list[ChatTool], Field(max_length=MAX_TOOLS, fail_fast=True)] = Field(
        default_factory=list
    )


class OllamaGenerateRequest(OllamaGenerationRequest):
    EXAMPLE: ClassVar = {"prompt": "What is a radix tree?", "options": {"num_predict": 100}}

    prompt: str = Field("", description="Without one the model is loaded, and nothing is answered.")
    system: str = ""
    raw: bool = Field(False, description="The prompt as it is, without the chat template.")
    images: Images = Field(default_factory=list)
    suffix: NoSuffix = ""
    template: ModelsTemplate = ""
    context: Context = Field(default_factory=list)

    @field_validator("images")
    @classmethod
    def _in_a_chat(cls, images: list[str], info: ValidationInfo) -> list[str]:
        if images and info.data.get("raw"):
            raise PydanticCustomError(UNSUPPORTED, "not supported together with raw")
        return images

    @field_validator("raw")
    @classmethod
    def _few_logprobs(cls, raw: bool, info: ValidationInfo) -> bool:
        if raw and info.data.get("top_logprobs", 0) > MAX_RAW_LOGPROBS:
            message = "top_logprobs is at most {limit} with it"
            raise PydanticCustomError("raw", message, {"limit": MAX_RAW_LOGPROBS})
        return raw


class OllamaShowRequest(RequestModel):
    """The name of a model. `name` is the older name of the field."""

    EXAMPLE: ClassVar = {"model": ""}

    name: ModelName = ""
    model: ModelName = ""

    @property
    def named(self) -> str:
        return self.model or self.name


_NAME: JsonSchemaValue = {"type": "string", "minLength": 1}


class OllamaModelRequest(OllamaShowRequest):
    """The required name of a model."""

    EXAMPLE: ClassVar = {"model": "mlx-community/Qwen3-4B-4bit"}

    model_config = any_of(present(model=_NAME), present(name=_NAME))

    @model_validator(mode="after")
    def _has_a_name(self) -> Self:
        if not self.named:
            raise PydanticCustomError("model", "model is missing")
        return self


class OllamaPullRequest(OllamaModelRequest):
    EXAMPLE: ClassVar = {"model": "mlx-community/Qwen3-4B-4bit"}

    stream: bool = True


class OllamaEmbedding(RequestModel):
    """The common fields of both embedding routes."""

    model: ModelName = ""
    truncate: bool = Field(True, description="Cut a text at what the model takes, or refuse it.")
    options: OllamaOptions = Field(default_factory=OllamaOptions)
    keep_alive: KeepAlive | None = None
    cache_salt: str = Field("", max_length=256)


class OllamaEmbedRequest(OllamaEmbedding):
    EXAMPLE: ClassVar = {"input": ["What is a radix tree?", "What is a block?"]}

    input: str | Annotated[list[str], Field(max_length=MAX_INPUTS)] = ""
    dimensions: int | None = Field(None, ge=1)

    @property
    def texts(self) -> list[str]:
        if isinstance(self.input, list):
            return self.input
        return [self.input] if self.input else []


class OllamaEmbeddingsRequest(OllamaEmbedding):
    EXAMPLE: ClassVar = {"prompt": "What is a radix tree?"}

    prompt: str = ""


class OllamaVectors(TypedDict):
    """Durations are nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaVector(TypedDict):
    embedding: list[float]


DoneReason = Literal["stop", "length", "load", "unload"]


class OllamaFunction(TypedDict):
    index: int
    name: str
    arguments: dict[str, Any]


class OllamaToolCall(TypedDict):
    id: str
    function: OllamaFunction


class OllamaMessage(TypedDict):
    role: Literal["assistant"]
    content: str
    thinking: NotRequired[str]
    tool_calls: NotRequired[list[OllamaToolCall]]


class OllamaAnswer(TypedDict):
    """A line of a stream (the last has `done`), or the whole answer. Durations in nanoseconds:
    `load_duration` until the engine has the request, then until the first token, then until the
    end.
    """

    model: str
    created_at: datetime
    done: bool
    done_reason: NotRequired[DoneReason]
    total_duration: NotRequired[int]
    load_duration: NotRequired[int]
    prompt_eval_count: NotRequired[int]
    prompt_eval_duration: NotRequired[int]
    eval_count: NotRequired[int]
    eval_duration: NotRequired[int]
    logprobs: NotRequired[list[TokenLogprobBody]]
    prompt_progress: NotRequired[ProgressBody]  # with return_progress, before the answer begins


class OllamaChatContent(TypedDict):
    message: OllamaMessage


class OllamaChatAnswer(OllamaAnswer, OllamaChatContent):
    pass


class OllamaGenerateContent(TypedDict):
    response: str
    thinking: NotRequired[str]


class OllamaGenerateAnswer(OllamaAnswer, OllamaGenerateContent):
    pass


class OllamaVersion(BaseModel):
    """The version of the API, not of the daemon, which clients compare with the one they need."""

    version: str


class OllamaDetails(BaseModel):
    """Empty where a checkpoint does not say."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(BaseModel):
    """A model that is served. `size` is that of its files, in bytes."""

    name: str
    model: str
    modified_at: datetime
    size: int
    digest: str
    details: OllamaDetails


class OllamaModels(BaseModel):
    models: list[OllamaModel]


class OllamaRunningModel(BaseModel):
    """A model that is loaded. Sizes are bytes of memory, of all and of the GPU's."""

    name: str
    model: str
    size: int
    digest: str
    details: OllamaDetails
    expires_at: datetime
    size_vram: int
    context_length: int


class OllamaRunningModels(BaseModel):
    models: list[OllamaRunningModel]


class OllamaModelInfo(BaseModel):
    """A model in detail. `parameters` are the sampling defaults."""

    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: datetime


class OllamaProgress(TypedDict):
    """A line of how fetching goes. `total` and `completed` are bytes."""

    status: str
    digest: NotRequired[str]
    total: NotRequired[int]
    completed: NotRequired[int]
