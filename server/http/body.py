"""Request bodies: read, parsed and validated, large ones in a worker thread."""

import codecs
from functools import partial
from typing import TypeVar

import jiter
import numpy as np
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from server.errors import ClientLeft, invalid, invalid_field
from server.http.waiting import client_waiting
from server.record import request_record
from server.workers import LARGE_BYTES, Workers

MAX_NODES = 100_000
"""Objects, lists and members of objects. A byte or two of each would become hundreds."""
MAX_ERROR_CHARACTERS = 200  # a client's own keys can be in it

OLLAMA_PATHS = "/api/"
BROWSER_HEADERS = ("origin", "sec-fetch-site")
"""Browsers send one of them, or both, with what a page posts; pages cannot leave them out."""

Model = TypeVar("Model", bound=BaseModel)


class BodyReader:
    """Turns the bytes of a request into a model. Belongs to one event loop.

    Large bodies are parsed in a worker thread, one at a time, which bounds the memory that parsing
    takes. A small one takes three milliseconds at most, and a thread would cost a tenth of one.
    """

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    async def read(self, request: Request, model: type[Model]) -> Model:
        """Sets the record's `n_bytes`. Raises ApiError (400), which names the field, and
        ClientLeft.
        """
        record = request_record(request.scope)
        _check_content_type(request)
        try:
            body = b"".join([chunk async for chunk in request.stream()])  # body() would keep it
        except ClientDisconnect:
            raise ClientLeft from None
        record.n_bytes = len(body)
        if record.n_bytes <= LARGE_BYTES:
            return parse(body, model)
        async with client_waiting(request.receive):
            return await self._workers.prepare(record, partial(parse, body, model))


def parse(body: bytes, model: type[Model]) -> Model:
    """The model that the JSON text describes.

    The text is UTF-8, at most some 200 levels deep, without NaN, Infinity, half surrogate pairs
    and keys that are there twice. Raises ApiError (400).
    """
    if count_nodes(body) > MAX_NODES:
        limit = f"at most {MAX_NODES} objects, lists and members of objects"
        raise invalid(f"The body has too many parts: {limit}.", None)
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


def count_nodes(body: bytes) -> int:
    """The objects, lists and members of a JSON text; of other bytes, some number.

    Counted by numpy, which lets other threads run meanwhile as a parser does not, and before
    anything is made of them.
    """
    unescaped = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    characters = np.frombuffer(unescaped, np.uint8)
    outside_strings = ~np.logical_xor.accumulate(characters == ord('"'))
    starts = (characters == ord("[")) | (characters == ord("{")) | (characters == ord(":"))
    return int(np.count_nonzero(starts & outside_strings))


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
