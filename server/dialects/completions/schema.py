"""`POST /v1/completions`: the request, the completion and its chunks."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, PlainValidator, ValidationInfo, field_validator
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import PydanticCustomError

from server.dialects.openai import UsageBody, WireFinishReason
from server.generation.request_fields import (
    MAX_PROMPTS,
    GenerationRequest,
    NoSuffix,
    Prompt,
    TokenLimit,
    WirePrompt,
    parse_prompts,
)
from server.generation.requests import TextCompletion
from server.generation.tools import MAX_TOOLS
from server.json_model import SparseModel, refused

WirePrompts = WirePrompt | Annotated[list[WirePrompt], Field(min_length=1, max_length=MAX_PROMPTS)]
Prompts = Annotated[list[Prompt], PlainValidator(parse_prompts, json_schema_input_type=WirePrompts)]
NoTools = SkipJsonSchema[
    Annotated[list[Any], Field(max_length=MAX_TOOLS), refused("only chat completions have tools")]
]


class CompletionRequest(GenerationRequest):
    EXAMPLE: ClassVar = {"prompt": "A radix tree is", "max_tokens": 32, "temperature": 0}

    prompt: Prompts | None = None
    max_tokens: TokenLimit | None = None
    logprobs: int | None = Field(None, ge=0, le=5)
    echo: bool = False
    best_of: int | None = Field(None, ge=1, le=20)
    suffix: NoSuffix = ""
    tools: NoTools = Field(default_factory=list)
    functions: NoTools = Field(default_factory=list)

    @field_validator("best_of")
    @classmethod
    def _best_of_at_least_n(cls, best_of: int | None, info: ValidationInfo) -> int | None:
        n, stream = info.data.get("n", 1), info.data.get("stream", False)
        if best_of is not None and best_of < n:
            raise PydanticCustomError("best_of", "must be at least n ({n})", {"n": n})
        if best_of is not None and best_of > n and stream:
            raise PydanticCustomError("best_of", "cannot be above n with stream")
        return best_of

    @property
    def completion(self) -> TextCompletion:
        """What the body asks for, without its fields of the answer's form."""
        return TextCompletion(
            prompts=self.prompt or [""],
            sampling=self,
            structure=self.structure,
            max_tokens=self.max_tokens,
            n=self.n,
            best_of=self.best_of,
            logprobs=self.logprobs,
            echo=self.echo,
        )


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
