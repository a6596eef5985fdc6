"""Middleware of all requests: the request id, the access log, errors, the time limit."""

import logging
import math
from uuid import uuid4

from anyio import current_time
from anyio.lowlevel import checkpoint_if_cancelled
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.dialects.errors import error_response
from server.errors import ApiError
from server.http.http_middleware import HttpMiddleware
from server.metrics.metrics import HttpAnswers
from server.record import RequestRecord, request_record

log = logging.getLogger("rootstock.access")


class RequestLog(HttpMiddleware):
    """Gives each request an id and a deadline, writes its line of the access log, and counts it.

    The id is always the server's own: one chosen by a client could collide with another's.
    """

    def __init__(self, app: ASGIApp, answers: HttpAnswers, timeout_seconds: float) -> None:
        super().__init__(app)
        self._answers = answers
        self._timeout_seconds = timeout_seconds

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = current_time()
        deadline = started + self._timeout_seconds
        record = RequestRecord(uuid4().hex, _address(scope), deadline, scope["path"])
        scope.setdefault("state", {})["record"] = record

        async def watched() -> Message:
            message = await receive()
            if message["type"] == "http.disconnect" and not record.is_answered:
                record.leave()
            return message

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.answer(message["status"])
                record.slot.release()  # no other request waits for a client that does not read
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = headers["Request-Id"] = record.id  # Anthropic's name
            elif message["type"] == "http.response.body" and not message.get("more_body", False):
                record.is_answered = True  # ASGI says `http.disconnect` behind a whole answer, too
            await send(message)

        try:
            await self.app(scope, watched, send_with_id)
        finally:
            self._answers.count(_route(scope), scope["method"], record.status)
            log.info("%s", _access_line(scope, record, current_time() - started))


class Errors(HttpMiddleware):
    """Answers what the middleware inside raises, and any other exception with a 500."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = request_record(scope)
        try:
            await self.app(scope, receive, send)
        except Exception as error:
            if not isinstance(error, ApiError | HTTPException):
                log.exception("request %s failed", record.id)
            if record.status == 0:
                await error_response(scope, error)(scope, receive, send)


class TimeLimit(HttpMiddleware):
    """Ends a request whose answer has not begun by its deadline. Raises ApiError (504).

    An answer that has begun ends by itself, in its dialect.
    """

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        with request_record(scope).time_limit() as limit:

            async def send_in_time(message: Message) -> None:
                if message["type"] == "http.response.start":
                    await checkpoint_if_cancelled()  # a thread is not ended, and may end too late
                    limit.deadline = math.inf
                await send(message)

            await self.app(scope, receive, send_in_time)


def _route(scope: Scope) -> str | None:
    """The template of the path, such as `/v1/models/{id:path}`: the router notes what it chose."""
    route = scope.get("route")
    return route.path if isinstance(route, Route) else None


def _address(scope: Scope) -> str:
    """Of the peer, without its port. Empty where the transport has none."""
    peer = scope.get("client")
    return str(peer[0]) if peer else ""


def _access_line(scope: Scope, record: RequestRecord, seconds: float) -> str:
    """The path goes in as it was sent, percent-encoded, so that it cannot forge a line."""
    path = scope["raw_path"].decode("ascii", "backslashreplace")
    parts = [scope["method"], path, str(record.status), f"{seconds:.3f}s"]
    if record.usage is not None:
        parts.append(f"prompt={record.usage.prompt_tokens}")
        parts.append(f"cached={record.usage.cached_tokens}")
        parts.append(f"completion={record.usage.completion_tokens}")
    if record.cache_marks:
        parts.append(f"cache-control={record.cache_marks}")
    if record.key:
        parts.append(f"key={record.key}")
    if record.client_left:
        parts.append("client-left")
    return " ".join([*parts, f"id={record.id}"])
