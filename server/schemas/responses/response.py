"""The response object, and what the other routes of `/v1/responses` answer."""

from typing import Any, Literal

from pydantic import BaseModel

from server.schemas.base import SparseModel
from server.schemas.responses.output import OutputItem

ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class InputTokensDetails(BaseModel):
    cached_tokens: int
    cache_write_tokens: int  # always 0: writing to the cache costs nothing


class OutputTokensDetails(BaseModel):
    reasoning_tokens: int


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(BaseModel):
    code: str
    message: str


class IncompleteDetails(BaseModel):
    reason: Literal["max_output_tokens"]


class ResponseHead(SparseModel):
    """The fields of a response that never change: mostly those of the request."""

    id: str
    object: Literal["response"]
    created_at: int  # seconds since the epoch
    model: str
    background: bool
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    frequency_penalty: float
    max_tool_calls: int | None
    parallel_tool_calls: bool
    presence_penalty: float
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    user: str | None = None


class ResponseState(SparseModel):
    """The fields of a response that change while it is made. `usage` is null until it is made."""

    status: ResponseStatus
    completed_at: int | None
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    output: list[OutputItem]
    usage: ResponseUsage | None


class ResponseBody(ResponseState, ResponseHead):
    """One response, whole."""


class InputItemList(BaseModel):
    """A page of the items that a response was made from."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(BaseModel):
    object: Literal["response.input_tokens"]
    input_tokens: int


class DeletedResponse(BaseModel):
    id: str
    object: Literal["response"]
    deleted: Literal[True]
