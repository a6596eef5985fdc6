"""Errors as the error object of the path's dialect, whether raised in a route, in the middleware or
during a stream.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Scope

from server.dialects.messages.errors import messages_error
from server.dialects.ollama.errors import ollama_error
from server.dialects.openai import openai_error
from server.dialects.responses.errors import responses_error
from server.errors import CLIENT_LEFT_STATUS, ApiError, to_api_error
from server.record import request_record
from server.schemas.errors import ErrorResponse
from server.schemas.messages.answer import MessagesError
from server.schemas.ollama.answer import OllamaError
from server.transport.sse import json_line, sse_data, sse_event


@dataclass(frozen=True, slots=True)
class ErrorShape:
    """A dialect's error object, and how it is made from an error and the request id."""

    model: type[BaseModel]
    of: Callable[[ApiError, str], BaseModel]
    event: Callable[[bytes], bytes]  # in a stream that has had no event yet


OPENAI = ErrorShape(ErrorResponse, lambda error, request_id: openai_error(error), sse_data)
RESPONSES = ErrorShape(
    ErrorResponse, lambda error, request_id: responses_error(error), partial(sse_event, "error")
)
ANTHROPIC = ErrorShape(MessagesError, messages_error, partial(sse_event, "error"))
OLLAMA = ErrorShape(OllamaError, lambda error, request_id: ollama_error(error), json_line)

SHAPES = (("/v1/messages", ANTHROPIC), ("/v1/responses", RESPONSES), ("/api/", OLLAMA))
"""By path prefix; all other paths have OpenAI's."""

OPENAI_PATHS = ("/v1/chat/", "/v1/completions", "/v1/embeddings")
"""That OpenAI alone has, by prefix."""

ANTHROPIC_VERSION = "anthropic-version"
"""The header that Anthropic's clients send with each request."""

MAX_ASKED_CHARACTERS = 200  # the path is a client's own words
METHODS = ("DELETE", "GET", "HEAD", "PATCH", "POST", "PUT")


def error_response(scope: Scope, error: Exception) -> Response:
    """The error as the client of this path can read it."""
    api_error = to_api_error(error)
    body = _shape_for_client(scope).of(api_error, request_record(scope).id)
    return Response(
        body.model_dump_json(),
        status_code=api_error.status,
        headers=api_error.headers,
        media_type="application/json",
    )


def error_event(scope: Scope, error: Exception) -> bytes:
    """The error as the only event of the stream that was asked for."""
    shape = _shape_for_client(scope)
    body = shape.of(to_api_error(error), request_record(scope).id)
    return shape.event(body.model_dump_json().encode())


def error_shape(path: str) -> ErrorShape:
    """The shape of the path's dialect."""
    return next((shape for prefix, shape in SHAPES if path.startswith(prefix)), OPENAI)


def _shape_for_client(scope: Scope) -> ErrorShape:
    """The shape of the path's dialect. On a path that several dialects share, such as `/v1/models`,
    or that is not served at all, Anthropic's clients read Anthropic's errors.
    """
    path, shape = scope["path"], error_shape(scope["path"])
    is_shared = shape is OPENAI and not path.startswith(OPENAI_PATHS)
    return ANTHROPIC if is_shared and ANTHROPIC_VERSION in Headers(scope=scope) else shape


async def handle(request: Request, error: Exception) -> Response:
    """Exception handler for all that `to_api_error` knows."""
    return error_response(request.scope, error)


async def handle_unknown_url(request: Request, error: Exception) -> Response:
    """Exception handler for 404. Names the path: clients with a wrong base URL do not show it."""
    asked = f"{request.method} {request.scope['path']}"[:MAX_ASKED_CHARACTERS]
    message = f"This server has no {asked}; /docs lists what it has."
    return error_response(request.scope, HTTPException(404, message))


async def handle_wrong_method(request: Request, error: Exception) -> Response:
    """Exception handler for 405. Lists all methods of the path: the router would list those of one
    route, and each method here is a route of its own.
    """
    allowed = [method for method in METHODS if _is_served({**request.scope, "method": method})]
    headers = {"Allow": ", ".join(allowed)}
    return error_response(request.scope, HTTPException(405, headers=headers))


def _is_served(scope: Scope) -> bool:
    return any(route.matches(scope)[0] is Match.FULL for route in scope["app"].routes)


async def handle_client_left(request: Request, error: Exception) -> Response:
    """Exception handler for ClientLeft: the status is for the access log alone."""
    return Response(status_code=CLIENT_LEFT_STATUS)
