"""The parts of a route's OpenAPI description that FastAPI does not derive."""

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from pydantic import BaseModel

from server.dialects.errors import ErrorResponse
from server.json_model import RequestModel
from server.transport.sse import NDJSON

SCHEMAS = "#/components/schemas/{model}"
RETRY_AFTER = {"Retry-After": {"description": "seconds", "schema": {"type": "integer"}}}
BUSY_STATUSES = {429, 503}

Document = dict[str, Any]
Responses = dict[int | str, Document]


def errors(*statuses: int) -> Responses:
    """The errors that a route answers with, besides those of the middleware."""
    return {status: error_answer(status) for status in statuses}


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
    schema = {"anyOf": [reference(model) for model in models]}
    return {200: {"content": {NDJSON: {"itemSchema": schema}}}}


def _stream(event: Document) -> Responses:
    schema = {"type": "object", "required": list(event), "properties": event}
    return {200: {"content": {"text/event-stream": {"itemSchema": schema}}}}


def _json_text(*models: type[BaseModel]) -> Document:
    return {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": [reference(model) for model in models]},
    }


def json_body(model: type[RequestModel]) -> Document:
    """A route's request body, which a dependency reads where FastAPI does not see it."""
    media = {"schema": reference(model), "example": model.EXAMPLE}
    return {"requestBody": {"required": True, "content": {"application/json": media}}}


def error_answer(status: int) -> Document:
    response: Document = {
        "description": HTTPStatus(status).phrase,
        "content": json_content(ErrorResponse),
    }
    return response | {"headers": RETRY_AFTER} if status in BUSY_STATUSES else response


def json_content(model: type[BaseModel]) -> Document:
    return {"application/json": {"schema": reference(model)}}


def reference(model: type[BaseModel]) -> Document:
    return {"$ref": SCHEMAS.format(model=model.__name__)}
