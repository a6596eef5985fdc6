"""JSON of OpenAI-compatible servers, read leniently: only what is needed here."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import AliasChoices, BaseModel, Field, ValidationError

from server.terminal.client.events import Event, Finish, Reasoning, Text, Usage
from server.terminal.errors import TerminalError

MAX_ERROR_CHARACTERS = 500


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that a server lists. `context_tokens` is None where the server does not say."""

    name: str
    context_tokens: int | None


class _Delta(BaseModel):
    content: str | None = None
    reasoning: str | None = Field(
        None, validation_alias=AliasChoices("reasoning_content", "reasoning")
    )


class _Choice(BaseModel):
    delta: _Delta = _Delta()
    finish_reason: str | None = None


class _TokenDetails(BaseModel):
    cached_tokens: int | None = None


class _Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _TokenDetails | None = None


class _Chunk(BaseModel):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class _Model(BaseModel):
    id: str
    max_model_len: int | None = None  # as vLLM has it


class _ModelList(BaseModel):
    data: list[_Model] = Field(min_length=1)


def chunk_events(data: bytes) -> Iterator[Event]:
    """The events in a chunk of a stream. Raises TerminalError for an error or a broken chunk."""
    try:
        chunk = _Chunk.model_validate_json(data)
    except ValidationError:
        raise TerminalError(f"not a chunk of a chat completion: {one_line(data)}") from None
    if chunk.error is not None:
        raise TerminalError(error_message(data))
    for choice in chunk.choices:
        yield from _choice_events(choice)
    if chunk.usage is not None:
        yield _usage(chunk.usage)


def listed_models(body: bytes) -> list[ServedModel]:
    """The models, one or more, in an answer of GET /models. Raises TerminalError."""
    try:
        models = _ModelList.model_validate_json(body).data
    except ValidationError:
        raise TerminalError(f"not a list of models: {one_line(body)}") from None
    return [ServedModel(model.id, model.max_model_len) for model in models]


def error_message(body: bytes) -> str:
    """The message in OpenAI's error object or the likes of it, else the beginning of the body."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        return one_line(body)
    match content:
        case (
            {"error": {"message": str(message)}}
            | {"error": str(message)}
            | {"message": str(message)}
            | {"detail": str(message)}
        ):
            return one_line(message.encode(errors="replace"))
        case _:
            return one_line(body)


def error_code(body: bytes) -> str | None:
    """The code in OpenAI's error object."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        return None
    match content:
        case {"error": {"code": str(code)}}:
            return code
        case _:
            return None


def one_line(text: bytes) -> str:
    """The text's beginning, its line breaks and indents become spaces."""
    line = " ".join(text.decode(errors="replace").split())
    return line if len(line) <= MAX_ERROR_CHARACTERS else line[:MAX_ERROR_CHARACTERS] + "…"


def _choice_events(choice: _Choice) -> Iterator[Event]:
    if choice.delta.reasoning:
        yield Reasoning(choice.delta.reasoning)
    if choice.delta.content:
        yield Text(choice.delta.content)
    if choice.finish_reason:
        yield Finish(choice.finish_reason)


def _usage(usage: _Usage) -> Usage:
    details = usage.prompt_tokens_details or _TokenDetails()
    return Usage(usage.prompt_tokens, details.cached_tokens, usage.completion_tokens)
