"""`POST /v1/completions`."""

from typing import Annotated, Any, Literal, TypeGuard

from pydantic import BaseModel, Field, PlainValidator, ValidationInfo, field_validator
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import PydanticCustomError

from server.schemas.base import SparseModel, whole
from server.schemas.common import (
    GenerationRequest,
    TokenId,
    TokenLimit,
    UsageBody,
    WireFinishReason,
)
from server.schemas.errors import UNSUPPORTED
from server.schemas.tools import MAX_TOOLS

MAX_PROMPTS = 256

Prompt = str | list[int]


def parse_prompts(value: object, most: int = MAX_PROMPTS) -> list[Prompt]:
    """The four shapes of a prompt - text, token ids, and lists of either - as a list of prompts, of
    which there may be so many.
    """
    if not isinstance(value, list) or _token_ids(value) is not None:
        return [_parse(value)]
    if len(value) > most:
        message = "at most {limit} prompts in one request"
        raise PydanticCustomError("prompt", message, {"limit": most})
    return [_parse(prompt) for prompt in value]


def _parse(value: object) -> Prompt:
    if isinstance(value, str):
        return value
    if (tokens := _token_ids(value)) is not None:
        return tokens
    raise PydanticCustomError(
        "prompt", "must be a string, a list of strings, token ids, or a list of those"
    )


def parse_token_ids(value: object) -> list[int]:
    """Token ids alone. In Python, which lets other threads run: there may be millions of them."""
    if (tokens := _token_ids(value)) is not None:
        return tokens
    raise PydanticCustomError("tokens", "must be a list of token ids")


def _token_ids(value: object) -> list[int] | None:
    """The list as token ids; None for what is none."""
    if not isinstance(value, list):
        return None
    if _is_integers(value):
        return value
    tokens = [whole(item) for item in value]
    return tokens if _is_integers(tokens) else None


def _is_integers(values: list[object]) -> TypeGuard[list[int]]:
    return all(type(value) is int for value in values)


WirePrompt = str | Annotated[list[TokenId], Field(min_length=1)]
WirePrompts = WirePrompt | Annotated[list[WirePrompt], Field(min_length=1, max_length=MAX_PROMPTS)]
Prompts = Annotated[list[Prompt], PlainValidator(parse_prompts, json_schema_input_type=WirePrompts)]


AnyList = Annotated[list[Any], Field(max_length=MAX_TOOLS)]


class CompletionRequest(GenerationRequest):
    prompt: Prompts | None = None
    max_tokens: TokenLimit | None = None
    logprobs: int | None = Field(None, ge=0, le=5)
    echo: bool = False
    best_of: int | None = Field(None, ge=1, le=20)
    suffix: SkipJsonSchema[str] = ""
    tools: SkipJsonSchema[AnyList] = Field(default_factory=list)
    functions: SkipJsonSchema[AnyList] = Field(default_factory=list)

    @field_validator("best_of")
    @classmethod
    def _best_of_at_least_n(cls, best_of: int | None, info: ValidationInfo) -> int | None:
        n, stream = info.data.get("n", 1), info.data.get("stream", False)
        if best_of is not None and best_of < n:
            raise PydanticCustomError("best_of", "must be at least n ({n})", {"n": n})
        if best_of is not None and best_of > n and stream:
            raise PydanticCustomError("best_of", "cannot be above n with stream")
        return best_of

    @field_validator("tools", "functions")
    @classmethod
    def _no_tools(cls, tools: list[Any]) -> list[Any]:
        if tools:
            raise PydanticCustomError(UNSUPPORTED, "only chat completions have tools")
        return tools

    @field_validator("suffix")
    @classmethod
    def _no_suffix(cls, suffix: str) -> str:
        if suffix:
            raise PydanticCustomError(UNSUPPORTED, "inserting text is not supported")
        return suffix


class CompletionLogprobs(BaseModel):
    """Parallel lists, one entry for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: WireFinishReason


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: UsageBody


class CompletionChunkChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: WireFinishReason | None  # null before the last: clients expect the key


class CompletionChunk(SparseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChunkChoice]
    usage: UsageBody | None = None  # set in the last chunk, with include_usage
