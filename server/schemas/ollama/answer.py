"""What Ollama's clients are sent: answers, line by line or whole, and errors."""

from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel

from server.schemas.base import SparseModel
from server.schemas.chat import TokenLogprobBody

DoneReason = Literal["stop", "length", "load", "unload"]


class OllamaError(BaseModel):
    """An error, in answer to a request or as the last line of a stream."""

    error: str


class OllamaFunction(BaseModel):
    index: int
    name: str
    arguments: dict[str, Any]


class OllamaToolCall(BaseModel):
    id: str
    function: OllamaFunction


class OllamaMessage(SparseModel):
    role: Literal["assistant"]
    content: str
    thinking: str | None = None
    tool_calls: list[OllamaToolCall] | None = None


class OllamaAnswer(SparseModel):
    """A line of a stream, of which the last is `done`, or the whole answer. Durations are
    nanoseconds: until the engine was asked, from then to the first token, and from that one on.
    """

    model: str
    created_at: datetime
    done: bool
    done_reason: DoneReason | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None
    logprobs: list[TokenLogprobBody] | None = None


class OllamaChatAnswer(OllamaAnswer):
    message: OllamaMessage


class OllamaGenerateAnswer(OllamaAnswer):
    response: str
    thinking: str | None = None
