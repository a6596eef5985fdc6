"""What every HTTP request passes on its way in: plain ASGI, so that streams are not buffered."""

import hmac
import logging
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.types import Usage
from server.dialects.errors import error_response
from server.errors import CLIENT_LEFT_STATUS, ApiError
from server.metrics import HttpAnswers
from server.settings import is_loopback

PROTECTED_PREFIXES = ("/v1", "/admin", "/tokenize", "/detokenize")

log = logging.getLogger("rootstock.access")


@dataclass(slots=True)
class RequestRecord:
    """What is known of one HTTP request: its id, who sent it, and what the access log shall say.

    `status` is 0 until the answer begins, or the client leaves before it.
    """

    id: str
    client: str  # its address, or what a trusted proxy says that it is
    key: str = ""  # the name of its API key; what is stored under one is not seen under another
    usage: Usage | None = None
    cache_marks: int = 0  # how often the client said `cache_control`
    status: int = 0
    client_left: bool = False

    def leave(self) -> None:
        self.client_left = True
        self.answer(CLIENT_LEFT_STATUS)

    def answer(self, status: int) -> None:
        self.status = self.status or status


def request_record(scope: Scope) -> RequestRecord:
    """The record that RequestLog made for this request."""
    return cast(RequestRecord, scope["state"]["record"])


class HttpMiddleware(ABC):
    """Passes on what is not an HTTP request: the application's start and end."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        passes = self.handle if scope["type"] == "http" else self.app
        await passes(scope, receive, send)

    @abstractmethod
    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None: ...


class RequestLog(HttpMiddleware):
    """Names each request, writes its access line, counts it, and turns a crash into a plain 500.

    The id is always the server's own: one chosen by a client could collide with another's.
    """

    def __init__(self, app: ASGIApp, answers: HttpAnswers) -> None:
        super().__init__(app)
        self._answers = answers

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = RequestRecord(uuid4().hex, _address(scope))
        scope.setdefault("state", {})["record"] = record
        started = time.monotonic()

        async def watched() -> Message:
            message = await receive()
            if message["type"] == "http.disconnect":
                record.leave()
            return message

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.answer(message["status"])
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = headers["Request-Id"] = record.id  # Anthropic's name
            await send(message)

        try:
            await self.app(scope, watched, send_with_id)
        except Exception as error:
            log.exception("request %s failed", record.id)
            if record.status == 0:
                await error_response(scope, error)(scope, receive, send_with_id)
        finally:
            self._answers.count(_route(scope), scope["method"], record.status)
            log.info("%s", _access_line(scope, record, time.monotonic() - started))


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
    if record.client_left:
        parts.append("client-left")
    return " ".join([*parts, f"id={record.id}"])


class BearerAuth(HttpMiddleware):
    """Asks for the API key. What watchers and routers need stays open."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        super().__init__(app)
        self._key = api_key.encode()

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not scope["path"].startswith(PROTECTED_PREFIXES):
            await self.app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"authorization", b"")
        if hmac.compare_digest(_bearer_token(given), self._key):
            await self.app(scope, receive, send)
            return
        error = ApiError(
            401,
            "A valid API key is needed: send it as 'Authorization: Bearer KEY'.",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await error_response(scope, error)(scope, receive, send)


def _bearer_token(authorization: bytes) -> bytes:
    """What follows the scheme, whose case and spaces do not matter (RFC 9110, section 11)."""
    scheme, _, token = authorization.strip(b" \t").partition(b" ")
    return token.lstrip(b" ") if scheme.lower() == b"bearer" else b""


class SameOrigin(HttpMiddleware):
    """Refuses what a browser sends on behalf of another site, when no API key stands guard.

    A web page may post to localhost without asking; its browser then says where it comes from.
    """

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        if origin is None or _is_of(origin, headers.get("host", "")):
            await self.app(scope, receive, send)
            return
        message = "Requests from other web sites are refused."
        error = ApiError(403, message, code="foreign_origin")
        await error_response(scope, error)(scope, receive, send)


def _is_of(origin: str, host: str) -> bool:
    """Whether an Origin header names this Host. `null`, and what is no URL, name none."""
    try:
        named = urlsplit(origin).netloc
    except ValueError:
        return False
    return bool(named) and named == host


class LoopbackHost(HttpMiddleware):
    """Refuses names that are not this machine's own, when bound to loopback with no API key.

    A foreign name that resolves to 127.0.0.1 is how DNS rebinding gets past the browser.
    """

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if _names_this_machine(scope):
            await self.app(scope, receive, send)
            return
        message = "The Host header must be localhost or a loopback address while no API key is set."
        error = ApiError(403, message, code="foreign_host")
        await error_response(scope, error)(scope, receive, send)


def _names_this_machine(scope: Scope) -> bool:
    """By its Host. HTTP/1.0 may come without one: no browser speaks that."""
    host = Headers(scope=scope).get("host")
    if host is None:
        return bool(scope["http_version"] == "1.0")
    return is_loopback(_without_port(host))


def _without_port(host: str) -> str:
    """`[::1]:8000` as `[::1]`, `localhost:8000` as `localhost`."""
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdigit() else host
