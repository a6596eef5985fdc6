"""The error object of each dialect. It follows the path, so a refusal of the gateway, an error
of a route and a failure during a stream look alike to a client.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Scope

from server.errors import CLIENT_LEFT_STATUS, ApiError, ContextTooLong, ModelNotFound, to_api_error
from server.http.stream import json_line, sse_data, sse_event
from server.record import request_record


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    error: ErrorBody


def openai_error(error: ApiError, param: str | None = None) -> ErrorResponse:
    """`param` is the client's name of the field at fault, where it is not the chat's."""
    param = param or error.param
    message = error.message(param)
    body = ErrorBody(message=message, type=error.type, param=param, code=error.code)
    return ErrorResponse(error=body)


RESPONSES_FIELDS = {"max_tokens": "max_output_tokens", "messages": "input"}
"""Fields of a chat with another name in a Responses request."""


def responses_error(error: ApiError) -> ErrorResponse:
    return openai_error(error, RESPONSES_FIELDS.get(error.param or ""))


class ResponsesErrorEvent(BaseModel):
    """The only event of a stream of `/v1/responses` that fails before its response exists."""

    type: Literal["error"]
    sequence_number: Literal[0]
    message: str
    param: str | None
    code: str | None


def responses_error_event(error: ApiError) -> ResponsesErrorEvent:
    body = responses_error(error).error
    return ResponsesErrorEvent(
        type="error", sequence_number=0, message=body.message, param=body.param, code=body.code
    )


class MessagesErrorBody(BaseModel):
    type: str
    message: str


class MessagesErrorDetails(BaseModel):
    error_code: str


class CodedMessagesErrorBody(MessagesErrorBody):
    """An error of compaction, by whose code Anthropic's clients tell it from others."""

    details: MessagesErrorDetails


class MessagesError(BaseModel):
    """An error, in answer to a request or as the last event of a stream."""

    type: Literal["error"]
    error: CodedMessagesErrorBody | MessagesErrorBody
    request_id: str


MESSAGES_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}

MESSAGES_FIELDS = {
    "stop": "stop_sequences",
    "thinking_budget": "thinking.budget_tokens",
}
"""Fields of a chat with another name in a Messages request."""


def messages_error(error: ApiError, request_id: str) -> MessagesError:
    kind = MESSAGES_TYPES.get(
        error.status, "api_error" if error.status >= 500 else "invalid_request_error"
    )
    body = MessagesErrorBody(type=kind, message=_message(error))
    if (error.code or "").startswith("compaction_"):
        details = MessagesErrorDetails(error_code=error.code or "")
        body = CodedMessagesErrorBody(**body.model_dump(), details=details)
    return MessagesError(type="error", error=body, request_id=request_id)


def _message(error: ApiError) -> str:
    if isinstance(error, ContextTooLong):  # these words make Claude Code compact
        return f"prompt is too long: {error.tokens} tokens > {error.limit} maximum{error.of_images}"
    return error.message(MESSAGES_FIELDS.get(error.param or "", error.param))


class OllamaError(BaseModel):
    """An error, in answer to a request or as the last line of a stream."""

    error: str


OLLAMA_FIELDS = {
    "stop": "options.stop",
    "response_format": "format",
    "repeat_last_n": "options.repeat_last_n",
}
"""Fields of a chat, or of a completion, with another name in Ollama's requests."""


def ollama_error(error: ApiError) -> OllamaError:
    if isinstance(error, ModelNotFound):
        return OllamaError(error=f"model '{error.name}' not found")  # the CLI looks for these words
    return OllamaError(error=error.message(OLLAMA_FIELDS.get(error.param or "", error.param)))


MakeError = Callable[[ApiError, str], BaseModel]
"""Makes an error object from an error and the request id."""


@dataclass(frozen=True, slots=True)
class ErrorShape:
    """A dialect's error object, and how it is sent in a stream that has had no event yet. A stream
    whose events have a shape of their own has the object that `event` makes.
    """

    model: type[BaseModel]
    of: MakeError
    frame: Callable[[bytes], bytes]
    event: MakeError | None = None


_named_error = partial(sse_event, "error")

OPENAI = ErrorShape(ErrorResponse, lambda error, request_id: openai_error(error), sse_data)
RESPONSES = ErrorShape(
    ErrorResponse,
    lambda error, request_id: responses_error(error),
    _named_error,
    lambda error, request_id: responses_error_event(error),
)
ANTHROPIC = ErrorShape(MessagesError, messages_error, _named_error)
OLLAMA = ErrorShape(OllamaError, lambda error, request_id: ollama_error(error), json_line)

SHAPES = (("/v1/messages", ANTHROPIC), ("/v1/responses", RESPONSES), ("/api/", OLLAMA))
"""By path prefix; all other paths have OpenAI's."""

OPENAI_PATHS = ("/v1/chat/", "/v1/completions", "/v1/embeddings", "/v1/files", "/v1/batches")
"""That OpenAI alone has, by prefix."""

ANTHROPIC_VERSION = "anthropic-version"
"""The header that Anthropic's clients send with each request."""

MAX_ASKED_CHARACTERS = 200  # the path is a client's own words
METHODS = ("DELETE", "GET", "HEAD", "PATCH", "POST", "PUT")


def error_response(scope: Scope, error: Exception) -> Response:
    """The error as the client of this path can read it."""
    api_error, record = to_api_error(error), request_record(scope)
    record.error_code = api_error.code
    body = _shape_for_client(scope).of(api_error, record.id)
    return Response(
        body.model_dump_json(),
        status_code=api_error.status,
        headers=api_error.headers,
        media_type="application/json",
    )


def error_event(scope: Scope, error: Exception) -> bytes:
    """The error as the only event of the requested stream."""
    shape = _shape_for_client(scope)
    make = shape.event or shape.of
    body = make(to_api_error(error), request_record(scope).id)
    return shape.frame(body.model_dump_json().encode())


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
    methods = [method for method in METHODS if _is_served({**request.scope, "method": method})]
    allowed = ", ".join(methods)
    message = f"This path is served for {allowed}, not for {request.method}."
    return error_response(request.scope, HTTPException(405, message, {"Allow": allowed}))


def _is_served(scope: Scope) -> bool:
    return any(route.matches(scope)[0] is Match.FULL for route in scope["app"].routes)


async def handle_client_disconnected(request: Request, error: Exception) -> Response:
    """Exception handler for ClientDisconnected: the status is for the access log alone."""
    return Response(status_code=CLIENT_LEFT_STATUS)
