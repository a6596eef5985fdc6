"""Request bodies: limited as they arrive, and bytes until a worker thread parses them. Only the few
fields of a `Head` are read before.
"""

import codecs
from collections.abc import Callable
from typing import Any, TypeVar

import jiter
from anyio import CancelScope, current_time
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive

from server.errors import ApiError, ClientDisconnected, invalid, invalid_field
from server.fairness import Reservation
from server.http.attachments import Attachments
from server.json_size import DIGITS_BYTES, PARTS, check_json_size, whole_characters

LIGHT_BYTES = 256 * 1024
LIGHT_PARTS = 8192
"""Braces, brackets, colons and commas of a body whose head is read on the event loop."""

QUICK_BYTES = 32 * 1024
QUICK_PARTS = 256
"""Those of a body that is parsed there. The slowest of so many, input items of `/v1/responses`,
took 0.7 ms on a core of an AMD EPYC."""

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


class Head(BaseModel):
    """The fields of a body that are read before it is parsed: they decide which model is held, and
    how the client waits for it.
    """

    model_config = ConfigDict(strict=True, extra="ignore")

    model: str | None = Field(None, max_length=256)
    stream: bool | None = None
    keep_alive: Any = None
    background: bool | None = None


async def read_body(request: Request, attachments: Attachments | None = None) -> bytes:
    """The body, whose bytes are counted as they come; without its attachments where it may have
    any. Raises ApiError (400, 413, 415) and ClientDisconnected.
    """
    _check_encoding(request)
    _check_content_type(request)
    try:
        if attachments is None:
            return b"".join([chunk async for chunk in request.stream()])  # body() would keep it
        async for chunk in request.stream():
            attachments.add(chunk)
        return attachments.text()
    except ClientDisconnect:
        raise ClientDisconnected from None


def is_light(body: bytes) -> bool:
    """Whether it takes less than a millisecond to read the head of the body, whatever it says. Its
    size need not be checked.
    """
    return _has_at_most(body, LIGHT_BYTES, LIGHT_PARTS) and not _has_many_digits(body)


def is_quick(body: bytes) -> bool:
    """Whether it takes less than a millisecond to parse the body, whatever it says."""
    return _has_at_most(body, QUICK_BYTES, QUICK_PARTS)


def _has_at_most(body: bytes, n_bytes: int, n_parts: int) -> bool:
    return len(body) <= n_bytes and sum(map(body.count, PARTS)) <= n_parts


def _has_many_digits(body: bytes) -> bool:
    """Whether a number may be too long to be read. Linear, whatever the body: a block ends at its
    first other byte.
    """
    starts = range(0, len(body), DIGITS_BYTES)
    return any(body[start : start + DIGITS_BYTES].isdigit() for start in starts)


def read_head(body: bytes) -> Head | None:
    """The head of a body; None where `parse` has to say what is wrong with it."""
    try:
        if not is_light(body):
            check_json_size(body)
        return Head.model_validate_json(body.removeprefix(codecs.BOM_UTF8))
    except ValueError:
        return None


def parse(body: bytes, model: type[Model], attachments: Attachments | None = None) -> Model:
    """The model that the JSON text describes. Of `attachments`, images stay references.

    The text is UTF-8, at most some 200 levels deep, without NaN, Infinity and keys that are there
    twice, and has no more parts than `check_json_size` allows. Half surrogate pairs, as of a client
    that has cut off a text, become U+FFFD. Raises ApiError (400).
    """
    try:
        if not is_quick(body):
            check_json_size(body)
    except ValueError as error:
        raise invalid(f"The body {error}.", None) from None
    body = body.removeprefix(codecs.BOM_UTF8)
    try:
        try:
            value = _value(body)
        except ValueError:
            if b"\\u" not in body:
                raise
            value = _value(whole_characters(body.decode()).encode())
        if attachments is not None and attachments.files:
            value = attachments.restored(value, len(body))
    except ValueError as error:
        problem = str(error)[:MAX_ERROR_CHARACTERS]
        raise invalid(f"The body cannot be read as JSON: {problem}.", None) from None
    if not isinstance(value, dict):
        raise invalid("The body must be a JSON object.", None)
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise invalid_field(error) from None


def _value(body: bytes) -> object:
    return jiter.from_json(body, allow_inf_nan=False, catch_duplicate_keys=True)


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
