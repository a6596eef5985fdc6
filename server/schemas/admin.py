"""The `/admin` routes."""

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import PydanticCustomError

from server.schemas.base import NULL, RequestModel
from server.schemas.chat import MAX_MESSAGES, Message
from server.schemas.completions import Prompt, WirePrompt, parse_prompts


def _parse_prompt(value: object) -> Prompt:
    prompts = parse_prompts(value)
    if len(prompts) != 1:
        raise PydanticCustomError("prompt", "one prompt at a time")
    return prompts[0]


WireOnePrompt = WirePrompt | Annotated[list[WirePrompt], Field(min_length=1, max_length=1)]
OnePrompt = Annotated[Prompt, PlainValidator(_parse_prompt, json_schema_input_type=WireOnePrompt)]


ONE_OF_BOTH: JsonSchemaValue = {
    "anyOf": [
        {
            "properties": {"messages": {"type": "array", "minItems": 1}, "prompt": NULL},
            "required": ["messages"],
        },
        {
            "properties": {"messages": NULL, "prompt": {"type": ["string", "array"]}},
            "required": ["prompt"],
        },
    ]
}


class ProbeRequest(RequestModel):
    """A chat body, or a prompt as text or token ids."""

    model_config = ConfigDict(json_schema_extra=ONE_OF_BOTH)

    messages: list[Message] = Field(default_factory=list, max_length=MAX_MESSAGES, fail_fast=True)
    prompt: OnePrompt | None = None
    cache_salt: str = Field("", max_length=256)

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if bool(self.messages) == (self.prompt is not None):
            raise PydanticCustomError("probe", "give either messages or prompt")
        return self


class ProbeResponse(BaseModel):
    prompt_tokens: int
    cached_tokens: int
    block_digests: list[str]  # of the whole blocks that would hit, hexadecimal


class ClearResponse(BaseModel):
    blocks_freed: int
    bytes_freed: int


class GroupSlots(BaseModel):
    """Slots of a kind of layer that does not keep every token: a window's blocks, or states."""

    model_config = ConfigDict(from_attributes=True)

    name: str
    total: int
    free: int
    cached: int
    held: int
    evictions: int


class CacheStatsResponse(BaseModel):
    """A block is free, cached (only the tree holds it) or held (in at least one table)."""

    model_config = ConfigDict(from_attributes=True)

    block_size: int
    blocks_total: int
    blocks_free: int
    blocks_cached: int
    blocks_held: int
    blocks_shared: int
    arena_bytes: int
    nodes: int
    queried_tokens: int
    hit_tokens: int
    evictions: int
    cow_copies: int
    groups: list[GroupSlots]


class LiveRequest(BaseModel):
    """One live sequence."""

    model_config = ConfigDict(from_attributes=True)

    request_id: str
    index: int
    status: str
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    output_tokens: int
    blocks: int
    age_seconds: float


class LiveRequests(BaseModel):
    requests: list[LiveRequest]
