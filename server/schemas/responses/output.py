"""Output items of a response."""

from typing import Any, Literal, Self, TypeAlias

from pydantic import BaseModel, PrivateAttr

from server.schemas.base import SparseModel
from server.schemas.chat import TokenLogprobBody

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class HasLogprobs(BaseModel):
    """A model with logprobs. The list stays empty where they are rendered beforehand."""

    logprobs: list[TokenLogprobBody]
    _rendered_logprobs: bytes = PrivateAttr(b"")

    @property
    def rendered_logprobs(self) -> bytes:
        """The list's members as JSON, with commas between."""
        return self._rendered_logprobs

    def with_rendered_logprobs(self, logprobs: bytes) -> Self:
        self._rendered_logprobs = logprobs
        return self


class OutputText(HasLogprobs):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]


class ReasoningText(BaseModel):
    type: Literal["reasoning_text"]
    text: str


class SummaryText(BaseModel):
    type: Literal["summary_text"]
    text: str


class OutputMessage(BaseModel):
    id: str
    type: Literal["message"]
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningOutput(SparseModel):
    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: list[SummaryText]
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None


class FunctionCallOutput(SparseModel):
    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str  # JSON


class CustomToolCallOutput(SparseModel):
    id: str
    type: Literal["custom_tool_call"]
    status: ItemStatus
    call_id: str
    name: str
    namespace: str | None = None
    input: str


OutputItem: TypeAlias = OutputMessage | ReasoningOutput | FunctionCallOutput | CustomToolCallOutput
