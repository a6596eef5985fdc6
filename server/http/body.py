"""Request bodies: limited as they arrive, then parsed and validated, all but the quickest in a
worker thread.
"""

import codecs
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import jiter
from anyio import CancelScope, current_time
from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive

from server.errors import ApiError, ClientDisconnected, invalid, invalid_field
from server.fairness import Reservation
from server.http.stream import client_waiting
from server.json_model import MAX_NODES, check_json_size, is_quick, most_parts
from server.record import request_record
from server.workers import Workers

PARSED_BYTES_PER_BYTE = 8
PARSED_BYTES_PER_PART = 350
"""Estimates of what is made of a body: texts, also as a prompt, token ids, and the objects of its
parts. Messages of one letter, the costliest, take 380 bytes a part on CPython 3.11, measured with
tracemalloc; token ids take 8 bytes for each byte of their text.
"""

MAX_ERROR_CHARACTERS = 200  # a client's own keys can be in it

OLLAMA_PATHS = "/api/"
BROWSER_HEADERS = ("origin", "sec-fetch-site")
"""Browsers send at least one of these with requests of pages; pages cannot omit them."""

Model = TypeVar("Model", bound=BaseModel)


class ArrivingBody:
    """One request's body, whose bytes are counted in a reservation as they come.

    `complete` is called when the last of them has come, and may raise.
    """

    def __init__(
        self,
        receive: Receive,
        reservation: Reservation,
        complete: Callable[[], None],
        max_bytes: int,
        timeout_seconds: float,
    ) -> None:
        self._receive = receive
        self._reservation = reservation
        self._complete = complete
        self._max_bytes = max_bytes
        self._timeout_seconds = timeout_seconds
        self._deadline = current_time() + timeout_seconds
        self._n_bytes = 0
        self._is_complete = False

    def check_head(self, headers: Headers) -> None:
        """Raises ApiError (413) for a body that says it is too large, and what `complete`
        raises where there is no body.
        """
        declared = headers.get("content-length", "0")
        if declared.isdigit() and int(declared) > self._max_bytes:
            raise body_too_large(self._max_bytes)
        if declared == "0" and "transfer-encoding" not in headers:
            self._end()

    async def receive(self) -> Message:
        """The application's `receive`. Raises ApiError (408, 413, and that of a reservation that is
        evicted), and ClientDisconnected before all of it has come.
        """
        if self._is_complete:
            return await self._receive()
        with CancelScope(deadline=self._deadline) as limit:
            message = await self._receive()
        if limit.cancelled_caught:
            seconds = self._timeout_seconds
            late = f"The body did not arrive within {seconds:g} seconds."
            raise ApiError(408, late, code="body_timeout")
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        n_bytes = len(message.get("body", b""))
        self._n_bytes += n_bytes
        if self._n_bytes > self._max_bytes:
            raise body_too_large(self._max_bytes)
        self._reservation.add(n_bytes)
        if not message.get("more_body", False):
            self._end()
        return message

    def _end(self) -> None:
        self._complete()
        self._is_complete = True


def body_too_large(max_bytes: int) -> ApiError:
    """413: the body is larger than any may be."""
    message = f"The body is larger than {max_bytes} bytes."
    return ApiError(413, message, code="body_too_large")


class BodyReader:
    """Turns the bytes of a request into a model. Belongs to one event loop.

    Bodies that take a millisecond or more are parsed in a worker thread, of each client one at a
    time, which bounds the memory that parsing takes. A thread costs a tenth of a millisecond.
    """

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    async def read(self, request: Request, model: type[Model]) -> Model:
        """Sets the record's `n_bytes`, and reserves the memory of the parsed body. Raises ApiError
        (400, which names the field, 415 and 503) and ClientDisconnected.
        """
        record = request_record(request.scope)
        _check_encoding(request)
        _check_content_type(request)
        try:
            body = b"".join([chunk async for chunk in request.stream()])  # body() would keep it
        except ClientDisconnect:
            raise ClientDisconnected from None
        record.n_bytes = len(body)
        record.begin_preparation(parsed_bytes(body))
        try:
            if is_quick(body):
                return parse(body, model)
            async with client_waiting(request.receive):
                return await self._workers.prepare(record, partial(parse, body, model))
        finally:
            record.forget_body()


def parsed_bytes(body: bytes) -> int:
    """The estimated memory of a parsed body until the engine has its request."""
    parts = min(most_parts(body), MAX_NODES)  # of more a body is refused, before it is parsed
    return PARSED_BYTES_PER_BYTE * len(body) + PARSED_BYTES_PER_PART * parts


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


def _check_encoding(request: Request) -> None:
    """Raise ApiError (415) for a compressed body: its expanded size is unknown."""
    encoding = request.headers.get("content-encoding", "").strip()
    if encoding and encoding.lower() != "identity":
        message = (
            f"Content-Encoding: '{encoding[:64]}' is not supported; send the body as it is, "
            "without this header."
        )
        raise ApiError(415, message, code="unsupported_content_encoding")


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
