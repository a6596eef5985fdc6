"""Request bodies: read, parsed and validated, all but the quickest in a worker thread."""

import codecs
from functools import partial
from typing import TypeVar

import jiter
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from server.errors import ClientDisconnected, invalid, invalid_field
from server.http.stream import client_waiting
from server.json_size import check_json_size, is_quick
from server.record import request_record
from server.workers import Workers

MAX_ERROR_CHARACTERS = 200  # a client's own keys can be in it

OLLAMA_PATHS = "/api/"
BROWSER_HEADERS = ("origin", "sec-fetch-site")
"""Browsers send one of them, or both, with what a page posts; pages cannot leave them out."""

Model = TypeVar("Model", bound=BaseModel)


class BodyReader:
    """Turns the bytes of a request into a model. Belongs to one event loop.

    Bodies that take a millisecond or more are parsed in a worker thread, of each client one at a
    time, which bounds the memory that parsing takes. A thread costs a tenth of a millisecond.
    """

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    async def read(self, request: Request, model: type[Model]) -> Model:
        """Sets the record's `n_bytes`. Raises ApiError (400), which names the field, and
        ClientDisconnected.
        """
        record = request_record(request.scope)
        _check_content_type(request)
        try:
            body = b"".join([chunk async for chunk in request.stream()])  # body() would keep it
        except ClientDisconnect:
            raise ClientDisconnected from None
        record.n_bytes = len(body)
        if is_quick(body):
            return parse(body, model)
        async with client_waiting(request.receive):
            return await self._workers.prepare(record, partial(parse, body, model))


def parse(body: bytes, model: type[Model]) -> Model:
    """The model that the JSON text describes.

    The text is UTF-8, at most some 200 levels deep, without NaN, Infinity, half surrogate pairs
    and keys that are there twice, and has no more parts than `check_json_size` allows. Raises
    ApiError (400).
    """
    try:
        if not is_quick(body):
            check_json_size(body)
    except ValueError as error:
        raise invalid(f"The body {error}.", None) from None
    try:
        value = jiter.from_json(
            body.removeprefix(codecs.BOM_UTF8), allow_inf_nan=False, catch_duplicate_keys=True
        )
    except ValueError as error:
        problem = str(error)[:MAX_ERROR_CHARACTERS]
        raise invalid(f"The body cannot be read as JSON: {problem}.", None) from None
    if not isinstance(value, dict):
        raise invalid("The body must be a JSON object.", None)
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise invalid_field(error) from None


def _check_content_type(request: Request) -> None:
    """Raise ApiError (400) for a type other than JSON. A missing one is accepted, and under /api
    any from a program that is no browser: Ollama's examples for curl name no type, so curl sends
    that of a form.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    subtype = media_type.removeprefix("application/")
    is_json = not media_type or subtype == "json" or subtype.endswith("+json")
    is_program = not any(name in request.headers for name in BROWSER_HEADERS)
    if not is_json and not (is_program and request.url.path.startswith(OLLAMA_PATHS)):
        message = f"The body must be JSON, sent as application/json, not '{media_type[:64]}'."
        raise invalid(message, None)
