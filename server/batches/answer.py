"""Has one line of a batch answered by the route that it names, as a request of its client's."""

import json
import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from anyio import sleep_forever
from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import ASGIApp, Message

from server.access.keys import Keyring
from server.batches.lines import UNSERVED, LineBody
from server.batches.store import StoredBatch
from server.errors import ApiError, InvalidField
from server.fairness import Budget
from server.record import Principal, RequestRecord

BUSY_STATUSES = frozenset({429, 503})
"""Of answers that say that there is no room now."""

DEFAULT_RETRY_SECONDS, MAX_RETRY_SECONDS = 5.0, 60.0

log = logging.getLogger("rootstock.batches")


class KeyGone(Exception):
    """The API key of a batch is no longer known."""


@dataclass(frozen=True, slots=True)
class LineAnswer:
    """A response. `retry_seconds`: when to ask again, where it only says that there is no room."""

    status: int
    request_id: str
    body: bytes
    retry_seconds: float | None


MakeError = Callable[[dict[str, Any], Exception], Response]
"""Makes the response of an error for the client of an ASGI scope."""


class LineAnswerer:
    """Answers lines. `routes` is an application with the routes that they may name, without access
    control and limits: the batch was let in. `make_error` makes the response of an error.
    """

    def __init__(
        self,
        routes: ASGIApp,
        make_error: MakeError,
        keys: Keyring,
        bodies: Budget,
        output: Budget,
        *,
        has_namespaces: bool,
    ) -> None:
        self._routes = routes
        self._make_error = make_error
        self._keys = {key.name: key for key in keys.keys}
        self._bodies = bodies
        self._output = output
        self._has_namespaces = has_namespaces

    def principal(self, batch: StoredBatch) -> Principal:
        """Who a batch's lines come from: its key as it is now. It is another client than that of
        the key's chats, which need not wait for its lines. Raises KeyGone.
        """
        client = f"{batch.client} (batches)"
        if not batch.owner:
            if self._keys:
                raise KeyGone
            return Principal(client)
        key = self._keys.get(batch.owner)
        if key is None:
            raise KeyGone
        return Principal(
            client,
            key=key.name,
            namespace=key.name if self._has_namespaces else "",
            allowed_models=None if key.models is None else frozenset(key.models),
        )

    async def answer(self, batch: StoredBatch, principal: Principal, body: LineBody) -> LineAnswer:
        """The answer to a body of the batch's endpoint. An error is an answer, too."""
        record = RequestRecord(
            uuid4().hex, principal, path=batch.endpoint, user_agent="batch", is_background=True
        )
        scope = _scope(batch.endpoint, record)
        sent = _Sent()
        try:
            if body.unserved is not None:
                raise InvalidField(body.unserved, UNSERVED[body.unserved])
            await self._call(scope, record, body.json, sent)
        except Exception as error:
            if not isinstance(error, ApiError):
                log.exception("a line of %s failed", batch.id)
            sent = _Sent()
            await self._make_error(scope, error)(scope, _nothing, sent.send)
        return sent.answer(record.id)

    async def _call(
        self, scope: dict[str, Any], record: RequestRecord, text: bytes, sent: "_Sent"
    ) -> None:
        messages: list[Message] = [{"type": "http.request", "body": text, "more_body": False}]

        async def receive() -> Message:
            return messages.pop() if messages else await _nothing()  # the client waits

        with ExitStack() as reserved:
            record.output = reserved.enter_context(self._output.reserve(record.client, record.end))
            record.body = reserved.enter_context(self._bodies.reserve(record.client, record.end))
            with record.time_limit() as record.limit:
                async with record.held:
                    record.body.add(len(text))
                    await self._routes(scope, receive, sent.send)


class _Sent:
    """What an application sends."""

    def __init__(self) -> None:
        self.status = 0
        self._headers = dict[bytes, bytes]()
        self._body = list[bytes]()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self._headers = dict(message["headers"])
        else:
            self._body.append(message.get("body", b""))

    def answer(self, request_id: str) -> LineAnswer:
        retry_seconds = None
        if self.status in BUSY_STATUSES:
            wanted = self._headers.get(b"retry-after", b"")
            retry_seconds = float(wanted) if wanted.isdigit() else DEFAULT_RETRY_SECONDS
            retry_seconds = min(retry_seconds, MAX_RETRY_SECONDS)
        return LineAnswer(self.status, request_id, b"".join(self._body), retry_seconds)


async def _nothing() -> Message:
    await sleep_forever()
    raise AssertionError("it does not return")


def _scope(path: str, record: RequestRecord) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json")],
        "client": None,
        "server": None,
        "state": {"record": record},
    }


def answered_line(batch: StoredBatch, custom_id: str, answer: LineAnswer) -> bytes:
    """The line of results of an answer."""
    body = answer.body if _is_json(answer.body) else to_json(answer.body.decode("utf-8", "replace"))
    if batch.is_of_messages:
        kind = b'"succeeded","message"' if answer.status == 200 else b'"errored","error"'
        return b'{"custom_id":%b,"result":{"type":%b:%b}}\n' % (to_json(custom_id), kind, body)
    return b'{"id":"batch_req_%b","custom_id":%b,"response":%b,"error":null}\n' % (
        uuid4().hex.encode(),
        to_json(custom_id),
        b'{"status_code":%d,"request_id":%b,"body":%b}'
        % (answer.status, to_json(answer.request_id), body),
    )


OPENAI_REASONS = {
    "expired": "This request could not be executed before the completion window expired.",
    "cancelled": "The batch was cancelled before this request was executed.",
}


def unanswered_line(batch: StoredBatch, custom_id: str, reason: str) -> bytes:
    """The line of results of a request that was not answered: `expired` or `cancelled`."""
    if batch.is_of_messages:
        kind = "canceled" if reason == "cancelled" else reason
        return to_json({"custom_id": custom_id, "result": {"type": kind}}) + b"\n"
    error = {"code": f"batch_{reason}", "message": OPENAI_REASONS[reason]}
    id = f"batch_req_{uuid4().hex}"
    return to_json({"id": id, "custom_id": custom_id, "response": None, "error": error}) + b"\n"


def _is_json(body: bytes) -> bool:
    try:
        json.loads(body)
    except ValueError:
        return False
    return b"\n" not in body
