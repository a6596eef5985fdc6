"""Limits on each request: the body's bytes and time, requests in progress, unsent bytes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from anyio import CancelScope, current_time
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import CLIENT_LEFT_STATUS
from server.http.connections import Guard, guard_of
from server.http.http_middleware import HttpMiddleware
from server.http.unsent import UnsentBudget
from server.record import request_record

ALWAYS_ANSWERED = {"/health", "/load", "/metrics"}
RETRY_AFTER_SECONDS = 5


class BodyBudget:
    """The bytes of the bodies of all requests in progress.

    Where they would be too many, the largest body that is still arriving is refused, so that large
    bodies do not cost clients that send small ones.
    """

    def __init__(self, max_body_bytes: int, max_total_bytes: int, timeout_seconds: float) -> None:
        self.max_body_bytes = max_body_bytes
        self.timeout_seconds = timeout_seconds
        self._max_total_bytes = max_total_bytes
        self._total_bytes = 0
        self._arriving: set[ArrivingBody] = set()

    @contextmanager
    def body(self, receive: Receive, admit: Callable[[], None]) -> Iterator["ArrivingBody"]:
        """A request's body, whose bytes are counted until the block ends."""
        body = ArrivingBody(self, receive, admit)
        self._arriving.add(body)
        try:
            yield body
        finally:
            self._forget(body)

    def grown(self, body: "ArrivingBody", n_bytes: int) -> None:
        """Raises HTTPException (413, 503)."""
        body.n_bytes += n_bytes
        self._total_bytes += n_bytes
        if body.n_bytes > self.max_body_bytes:
            raise self.too_large()
        if self._total_bytes > self._max_total_bytes:
            largest = max(self._arriving, key=lambda other: other.n_bytes)
            self._forget(largest)
            largest.refuse()

    def complete(self, body: "ArrivingBody") -> None:
        self._arriving.discard(body)

    def _forget(self, body: "ArrivingBody") -> None:
        self._arriving.discard(body)
        self._total_bytes -= body.n_bytes
        body.n_bytes = 0

    def too_large(self) -> HTTPException:
        return HTTPException(413, f"The body is larger than {self.max_body_bytes} bytes.")


class ArrivingBody:
    """One request's body while it arrives. `admit` is called when it is complete, and may raise."""

    def __init__(self, bodies: BodyBudget, receive: Receive, admit: Callable[[], None]) -> None:
        self.n_bytes = 0
        self._bodies = bodies
        self._receive = receive
        self._admit = admit
        self._deadline = current_time() + bodies.timeout_seconds
        self._waiting = CancelScope()
        self._refused = False
        self._is_complete = False

    async def receive(self) -> Message:
        """The application's `receive`. Raises HTTPException (408, 413, 499, 503)."""
        if self._is_complete:
            return await self._receive()
        message = await self._next()
        if message["type"] == "http.disconnect":
            raise HTTPException(CLIENT_LEFT_STATUS, "The client left.")
        self._bodies.grown(self, len(message.get("body", b"")))
        self._check()
        if not message.get("more_body", False):
            self.complete()
        return message

    def refuse(self) -> None:
        self._refused = True
        self._waiting.cancel()

    def complete(self) -> None:
        """Raises what `admit` raises."""
        self._admit()
        self._is_complete = True
        self._bodies.complete(self)

    async def _next(self) -> Message:
        self._check()
        with CancelScope(deadline=self._deadline) as self._waiting:
            message = await self._receive()
        self._check()
        if self._waiting.cancelled_caught:
            seconds = self._bodies.timeout_seconds
            raise HTTPException(408, f"The body did not arrive within {seconds:g} seconds.")
        return message

    def _check(self) -> None:
        if self._refused:
            raise _overloaded("The bodies of all requests are too large together.")


class ConnectionUse(HttpMiddleware):
    """Tells the connection about its request, until the client has read the last byte."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        guard = guard_of(scope)
        guard.request_began()
        try:
            await self.app(scope, receive, send)
            await guard.flushed()
        finally:
            guard.request_ended()


class RequestLimits(HttpMiddleware):
    """Limits the body and the unsent bytes, and tells the connection when the body is complete.

    The body counts until the request is over, in the background too; unsent bytes count until the
    client has read the last one. Raises HTTPException (413, 503).
    """

    def __init__(self, app: ASGIApp, bodies: BodyBudget, unsent: UnsentBudget) -> None:
        super().__init__(app)
        self._bodies = bodies
        self._unsent = unsent

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        guard = guard_of(scope)
        taken = self._bodies.body(receive, partial(_admit, guard, scope["path"]))
        with self._unsent.answer(lambda error: guard.abort()) as scope["state"]["unsent"]:
            async with request_record(scope).held as held:
                body = held.enter_context(taken)
                self._check_head(Headers(scope=scope), body)
                await self.app(scope, body.receive, send)
            await guard.flushed()

    def _check_head(self, headers: Headers, body: ArrivingBody) -> None:
        declared = headers.get("content-length", "0")
        if declared.isdigit() and int(declared) > self._bodies.max_body_bytes:
            raise self._bodies.too_large()
        if declared == "0" and "transfer-encoding" not in headers:
            body.complete()


def _admit(guard: Guard, path: str) -> None:
    """Raises HTTPException (503) when as many requests are in progress as are allowed."""
    if guard.is_crowded and path not in ALWAYS_ANSWERED:
        raise _overloaded("The server answers as many requests as it has connections for.")
    guard.request_complete()


def _overloaded(message: str) -> HTTPException:
    return HTTPException(503, message, headers={"Retry-After": str(RETRY_AFTER_SECONDS)})
