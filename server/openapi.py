"""`/openapi.json`: what FastAPI derives from the routes, completed and corrected."""

import json
from collections.abc import Iterator, Sequence
from http import HTTPStatus

from anyio import Lock, to_thread
from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter
from starlette.responses import Response

from server.access.admission import is_limited, needed_role
from server.access.keys import Role
from server.dialects.endpoint import SCHEMAS, Document, Endpoints, error_answer, json_content
from server.dialects.error_shapes import ErrorResponse, error_shape
from server.json_model import AnswerType
from server.settings import Settings

NEVER_SENT = ("ValidationError", "HTTPValidationError")  # FastAPI's own, with its 422

SECURITY_SCHEMES: Document = {
    "Bearer": {"type": "http", "scheme": "bearer"},
    "ApiKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
"""Either will do: OpenAI's clients send the one, Anthropic's the other."""


class OpenApiDocument:
    """The document of one application, made once, when it is first requested.

    A worker thread makes it: the schemas of all models take too long for the event loop.
    """

    def __init__(self, app: FastAPI, settings: Settings, endpoints: Sequence[Endpoints]) -> None:
        self._app = app
        self._settings = settings
        self._endpoints = endpoints
        self._making = Lock()
        self._text: str | None = None

    async def answer(self, request: Request) -> Response:
        async with self._making:
            if self._text is None:
                self._text = await to_thread.run_sync(self._made)
        return Response(self._text, media_type="application/json")

    def _made(self) -> str:
        return json.dumps(document(self._app, self._settings, self._endpoints))


def document(app: FastAPI, settings: Settings, endpoints: Sequence[Endpoints]) -> Document:
    """The OpenAPI 3.1 description of a daemon with these settings, and with the models of these
    endpoints, which FastAPI does not see.
    """
    described = get_openapi(title=app.title, version=app.version, routes=app.routes)
    components = described["components"]
    components["schemas"] |= _schemas(settings, endpoints)
    for name in NEVER_SENT:
        components["schemas"].pop(name, None)
    if settings.keys:
        components["securitySchemes"] = SECURITY_SCHEMES
    for method, path, operation in _operations(described):
        operation["responses"].pop("422", None)
        for status in _general_errors(method, path, settings):
            operation["responses"][str(status)] = error_answer(status)
        if settings.keys and needed_role(path):
            operation["security"] = [{name: []} for name in SECURITY_SCHEMES]
        _shape_errors(operation, error_shape(path).model)
    return described


def _shape_errors(operation: Document, model: AnswerType) -> None:
    for status, answer in operation["responses"].items():
        if int(status) >= HTTPStatus.BAD_REQUEST:
            answer["content"] = json_content(model)


def _general_errors(method: str, path: str, settings: Settings) -> Iterator[int]:
    """Statuses of refusals by the gateway and of internal errors."""
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


def _schemas(settings: Settings, endpoints: Sequence[Endpoints]) -> Document:
    """Schemas of models that FastAPI does not see, without values that the settings refuse."""
    bodies = [body for each in endpoints for body in each.bodies]
    streamed = [model for each in endpoints for model in each.streamed]
    _, schemas = TypeAdapter.json_schemas(
        [
            *((body, "validation", TypeAdapter(body)) for body in bodies),
            *((model, "serialization", TypeAdapter(model)) for model in streamed),
            (ErrorResponse, "serialization", TypeAdapter(ErrorResponse)),
        ],
        ref_template=SCHEMAS,
    )
    found: Document = schemas["$defs"]
    if not settings.allow_priority:
        for body in bodies:
            found[body.__name__]["properties"].pop("priority", None)
    return found
