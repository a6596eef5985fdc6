"""A request for text completions: its prompts as text or token ids, and its fields."""

from typing import Annotated, Any, ClassVar, TypeGuard

from pydantic import Field, PlainValidator, ValidationInfo, field_validator
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import PydanticCustomError

from server.errors import UNSUPPORTED
from server.generation.request_fields import GenerationRequest, TokenId, TokenLimit
from server.generation.tools import MAX_TOOLS
from server.json_model import integral_to_int

MAX_PROMPTS = 256

Prompt = str | list[int]


def parse_prompts(value: object, most: int = MAX_PROMPTS) -> list[Prompt]:
    """Text, token ids, or a list of either, as a list of at most `most` prompts."""
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
    tokens = [integral_to_int(item) for item in value]
    return tokens if _is_integers(tokens) else None


def _is_integers(values: list[object]) -> TypeGuard[list[int]]:
    return all(type(value) is int for value in values)


WirePrompt = str | Annotated[list[TokenId], Field(min_length=1)]
WirePrompts = WirePrompt | Annotated[list[WirePrompt], Field(min_length=1, max_length=MAX_PROMPTS)]
Prompts = Annotated[list[Prompt], PlainValidator(parse_prompts, json_schema_input_type=WirePrompts)]


AnyList = Annotated[list[Any], Field(max_length=MAX_TOOLS)]


class CompletionRequest(GenerationRequest):
    EXAMPLE: ClassVar = {"prompt": "A radix tree is", "max_tokens": 32, "temperature": 0}

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
