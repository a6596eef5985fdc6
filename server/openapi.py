"""`/openapi.json`: what FastAPI derives from the routes, completed and corrected."""

import json
from collections.abc import Iterator, Sequence
from http import HTTPStatus
from typing import Any

from anyio import Lock, to_thread
from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.responses import Response

from server.access.areas import is_limited, needed_role
from server.access.keys import Role
from server.dialects.errors import error_shape
from server.schemas.admin import Activity
from server.schemas.chat import ChatChunk, ChatRequest
from server.schemas.completions import CompletionChunk, CompletionRequest
from server.schemas.embeddings import EmbeddingRequest
from server.schemas.errors import ErrorResponse
from server.schemas.examples import EXAMPLES
from server.schemas.messages.answer import MESSAGE_EVENTS
from server.schemas.messages.request import CountTokensRequest, MessagesRequest
from server.schemas.ollama.answer import OllamaError
from server.schemas.ollama.embed import OllamaEmbeddingsRequest, OllamaEmbedRequest
from server.schemas.ollama.models import OllamaProgress
from server.schemas.ollama.request import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaModelRequest,
    OllamaPullRequest,
    OllamaShowRequest,
)
from server.schemas.prompt import PromptOrChat
from server.schemas.rerank import RerankRequest, ScoreRequest
from server.schemas.responses.events import RESPONSE_EVENTS
from server.schemas.responses.request import InputTokensRequest, ResponsesRequest
from server.schemas.tokens import DetokenizeRequest, TokenizeRequest
from server.settings import Settings
from server.transport.sse import NDJSON

SCHEMAS = "#/components/schemas/{model}"
RETRY_AFTER = {"Retry-After": {"description": "seconds", "schema": {"type": "integer"}}}
BUSY_STATUSES = {429, 503}
NEVER_SENT = ("ValidationError", "HTTPValidationError")  # FastAPI's own, with its 422

STREAMED = (ChatChunk, CompletionChunk, Activity, OllamaProgress, OllamaError)
"""What streams alone are made of."""

Document = dict[str, Any]
Responses = dict[int | str, Document]

SECURITY_SCHEMES: Document = {
    "Bearer": {"type": "http", "scheme": "bearer"},
    "ApiKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
"""Either will do: OpenAI's clients send the one, Anthropic's the other."""


def errors(*statuses: int) -> Responses:
    """The errors that a route answers with, besides those of the middleware."""
    return {status: _error(status) for status in statuses}


def stream_of(chunk: type[BaseModel]) -> Responses:
    """The other shape of a 200, with `stream`: chunks, and [DONE] behind the last."""
    return _stream({"data": {"anyOf": [_json_text(chunk, ErrorResponse), {"const": "[DONE]"}]}})


def stream_of_events(events: Sequence[type[BaseModel]]) -> Responses:
    """The same where each event has a name."""
    return _stream({"event": {"type": "string"}, "data": _json_text(*events)})


def stream_of_data(model: type[BaseModel]) -> Responses:
    """Nothing but a stream, without an end."""
    return _stream({"data": _json_text(model)})


def stream_of_lines(*models: type[BaseModel]) -> Responses:
    """The other shape of a 200, with `stream`: a JSON object a line."""
    schema = {"anyOf": [_reference(model) for model in models]}
    return {200: {"content": {NDJSON: {"itemSchema": schema}}}}


def _stream(event: Document) -> Responses:
    schema = {"type": "object", "required": list(event), "properties": event}
    return {200: {"content": {"text/event-stream": {"itemSchema": schema}}}}


def _json_text(*models: type[BaseModel]) -> Document:
    return {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": [_reference(model) for model in models]},
    }


def json_body(model: type[BaseModel]) -> Document:
    """A route's request body, which a dependency reads where FastAPI does not see it."""
    media = {"schema": _reference(model), "example": EXAMPLES[model]}
    return {"requestBody": {"required": True, "content": {"application/json": media}}}


class OpenApiDocument:
    """The document of one application, made once, when it is first requested.

    A worker thread makes it: the schemas of all models take too long for the event loop.
    """

    def __init__(self, app: FastAPI, settings: Settings) -> None:
        self._app = app
        self._settings = settings
        self._making = Lock()
        self._text: str | None = None

    async def answer(self, request: Request) -> Response:
        async with self._making:
            if self._text is None:
                self._text = await to_thread.run_sync(self._made)
        return Response(self._text, media_type="application/json")

    def _made(self) -> str:
        return json.dumps(document(self._app, self._settings))


def document(app: FastAPI, settings: Settings) -> Document:
    """The OpenAPI 3.1 description of a daemon with these settings."""
    described = get_openapi(title=app.title, version=app.version, routes=app.routes)
    components = described["components"]
    components["schemas"] |= _schemas(settings)
    for name in NEVER_SENT:
        components["schemas"].pop(name, None)
    if settings.keys:
        components["securitySchemes"] = SECURITY_SCHEMES
    for method, path, operation in _operations(described):
        operation["responses"].pop("422", None)
        for status in _general_errors(method, path, settings):
            operation["responses"][str(status)] = _error(status)
        if settings.keys and needed_role(path):
            operation["security"] = [{name: []} for name in SECURITY_SCHEMES]
        _shape_errors(operation, error_shape(path).model)
    return described


def _shape_errors(operation: Document, model: type[BaseModel]) -> None:
    for status, answer in operation["responses"].items():
        if int(status) >= HTTPStatus.BAD_REQUEST:
            answer["content"] = _json(model)


def _general_errors(method: str, path: str, settings: Settings) -> Iterator[int]:
    """What the middleware answers, and what a crash does."""
    yield 500
    if settings.request_timeout_seconds is not None:
        yield 504
    if not settings.keys:
        yield 403
    elif role := needed_role(path):
        yield 401
        if role is Role.ADMIN:
            yield 403
        if settings.keys.has_limits and is_limited(method, path):
            yield 429


def _operations(described: Document) -> Iterator[tuple[str, str, Document]]:
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, operation


def _schemas(settings: Settings) -> Document:
    """Of the models that FastAPI does not see. What the settings refuse is not in them."""
    bodies: list[type[BaseModel]] = [
        *(ChatRequest, CompletionRequest, ResponsesRequest, InputTokensRequest),
        *(MessagesRequest, CountTokensRequest),
        *(OllamaChatRequest, OllamaGenerateRequest, OllamaShowRequest),
        *(OllamaModelRequest, OllamaPullRequest, OllamaEmbedRequest, OllamaEmbeddingsRequest),
        *(PromptOrChat, TokenizeRequest, DetokenizeRequest),
        *(EmbeddingRequest, RerankRequest, ScoreRequest),
    ]
    _, schemas = models_json_schema(
        [
            *((body, "validation") for body in bodies),
            *((model, "serialization") for model in STREAMED),
            (ErrorResponse, "serialization"),
            *((event, "serialization") for event in (*MESSAGE_EVENTS, *RESPONSE_EVENTS)),
        ],
        ref_template=SCHEMAS,
    )
    found: Document = schemas["$defs"]
    if not settings.allow_priority:
        for body in bodies:
            found[body.__name__]["properties"].pop("priority", None)
    return found


def _error(status: int) -> Document:
    response: Document = {
        "description": HTTPStatus(status).phrase,
        "content": _json(ErrorResponse),
    }
    return response | {"headers": RETRY_AFTER} if status in BUSY_STATUSES else response


def _json(model: type[BaseModel]) -> Document:
    return {"application/json": {"schema": _reference(model)}}


def _reference(model: type[BaseModel]) -> Document:
    return {"$ref": SCHEMAS.format(model=model.__name__)}
