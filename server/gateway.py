"""The ASGI application around all routes: what every request passes before and after them."""

import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from uuid import uuid4

from anyio import current_time
from anyio.lowlevel import checkpoint_if_cancelled
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.access.admission import Origins, Policy, is_limited, peer_address
from server.activity import RequestTracker
from server.dialects.error_shapes import error_response
from server.errors import (
    CLIENT_LEFT_STATUS,
    RETRY_AFTER_SECONDS,
    ApiError,
    ClientDisconnected,
    busy,
)
from server.fairness import Budget, Reservation
from server.http.body import ArrivingBody, body_too_large
from server.http.connections import Connection, connection_of
from server.metrics.metrics import HttpAnswers
from server.record import Principal, RequestRecord, request_record
from server.settings import Settings

METHODS = ("GET", "HEAD", "POST", "DELETE")
READABLE_HEADERS = ("X-Request-Id", "Request-Id", "Retry-After")

FILES_PATH = "/v1/files"
MAX_FORM_BYTES = 64 * 1024  # of a form besides its file

ALWAYS_ANSWERED = {"/health", "/load", "/metrics"}
MAX_USER_AGENT_CHARACTERS = 200

log = logging.getLogger("rootstock.access")


class Gateway:
    """Gives each request an id and a deadline, checks access, limits its body, turns exceptions
    into responses, writes the access log, and counts it. A request for an answer that failed before
    it reached an engine goes into the tracker's log.

    The server always chooses the id: ids chosen by clients could collide.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: Settings,
        policy: Policy,
        bodies: Budget,
        output: Budget,
        answers: HttpAnswers,
        tracker: RequestTracker,
        may_take_images: Callable[[], bool],
    ) -> None:
        self._app = app
        self._settings = settings
        self._policy = policy
        self._bodies = bodies
        self._output = output
        self._answers = answers
        self._tracker = tracker
        self._may_take_images = may_take_images
        # Errors are answered inside CORS: a web page must be able to read them.
        self._answer = _with_cors(self._answer_errors, settings.cors_origin)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # the application's start and end
            await self._app(scope, receive, send)
            return
        began = current_time()
        deadline = began + (self._settings.request_timeout_seconds or math.inf)
        record = RequestRecord(
            uuid4().hex,
            Principal(peer_address(scope)),
            deadline,
            path=scope["path"],
            user_agent=Headers(scope=scope).get("user-agent", "")[:MAX_USER_AGENT_CHARACTERS],
        )
        scope.setdefault("state", {})["record"] = record
        connection = connection_of(scope)

        async def receive_watched() -> Message:
            message = await receive()
            if message["type"] == "http.disconnect" and not record.is_answered:
                record.client_left = True
                record.status = record.status or CLIENT_LEFT_STATUS
            return message

        async def send_recorded(message: Message) -> None:
            if message["type"] == "http.response.start":
                await checkpoint_if_cancelled()  # a thread is not ended, and may end too late
                record.begin_answer(message["status"])
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = headers["Request-Id"] = record.id  # Anthropic's name
            elif message["type"] == "http.response.body" and not message.get("more_body", False):
                record.is_answered = True  # ASGI has `http.disconnect` after a whole answer, too
            await send(message)

        if connection is not None:
            connection.request_began()
        try:
            await self._answer(scope, receive_watched, send_recorded)
            if connection is not None:
                await connection.flushed()
        finally:
            if connection is not None:
                connection.request_ended()
            self._answers.count(_route(scope), scope["method"], record.status)
            if is_limited(scope["method"], record.path):
                self._tracker.note_refused(record, current_time() - began)
            log.info("%s", _access_line(scope, record, current_time() - began))

    async def _answer_errors(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Turn exceptions into error responses. A response that has begun is cut off instead."""
        record = request_record(scope)
        try:
            await self._answer_in_time(record, scope, receive, send)
        except Exception as error:
            # Starlette wraps what ends a response that has begun.
            has_left = isinstance(error.__cause__, ClientDisconnected)
            if not has_left and not isinstance(error, ApiError | HTTPException):
                log.exception("request %s failed", record.id)
            if record.status == 0:
                await error_response(scope, error)(scope, receive, send)
            elif not record.is_answered and (connection := connection_of(scope)) is not None:
                connection.abort()

    async def _answer_in_time(
        self, record: RequestRecord, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Let the request in and pass it on. Raises ApiError for one that is refused, or whose
        answer has not begun by its deadline.

        Its output is counted until the client has read it.
        """
        record.principal = self._policy.identify(scope)
        connection = connection_of(scope)

        def evict(error: ApiError) -> None:
            if not record.end(error) and connection is not None:
                connection.abort()

        with self._output.reserve(record.client, evict) as record.output:
            with record.time_limit() as record.limit:
                async with record.held as held:
                    reserved = self._bodies.reserve(record.client, record.end)
                    record.body = held.enter_context(reserved)
                    await self._policy.admit(record, scope)
                    body = self._arriving_body(scope, receive, record.body, connection)
                    await self._app(scope, body.receive, send)
            if connection is not None:
                await connection.flushed()

    def _arriving_body(
        self,
        scope: Scope,
        receive: Receive,
        reservation: Reservation,
        connection: Connection | None,
    ) -> ArrivingBody:
        """Raises ApiError for a body that is too large (413), and where as many requests as there
        may be are in progress (503).
        """

        def complete() -> None:
            if connection is None:
                return
            client = request_record(scope).client
            if connection.is_full_for(client) and scope["path"] not in ALWAYS_ANSWERED:
                message = "The server answers as many requests as it has connections for."
                raise busy(503, message, "overloaded", RETRY_AFTER_SECONDS)
            connection.request_complete(client)

        settings = self._settings
        most = int(settings.max_body_bytes)
        if scope["path"] == FILES_PATH:
            most = settings.max_file_bytes + MAX_FORM_BYTES
        elif self._may_take_images():
            most = max(most, settings.max_image_body_bytes)
        body = ArrivingBody(receive, reservation, complete, most, settings.body_timeout_seconds)
        body.check_head(Headers(scope=scope))
        return body


def _with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """The application with CORS headers for the pages of these origins, if there are any. Pages
    send their key themselves: there are no credentials in the sense of CORS.
    """
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origin_regex=Origins(origins).pattern,
        allow_methods=METHODS,
        allow_headers=("*",),
        expose_headers=READABLE_HEADERS,
        allow_private_network=True,  # public pages, and a daemon in their visitor's network
    )


def body_budget(settings: Settings) -> Budget:
    """The memory of all bodies that no worker has read, and of what answers keep of them."""
    message = (
        "The bodies of all requests are too large together, and this was the largest "
        "(max_total_body_bytes)."
    )
    total_bytes = settings.max_total_body_bytes
    return Budget(
        total_bytes,
        total_bytes,
        too_large=partial(body_too_large, settings.max_body_bytes),
        too_much=partial(busy, 503, message, "overloaded", RETRY_AFTER_SECONDS),
    )


def output_budget(settings: Settings) -> Budget:
    """The memory of all output that clients have not read."""
    too_large = (
        f"More than {settings.max_unsent_bytes} bytes of this answer were waiting to be sent "
        "(max_unsent_bytes). Read a stream as it comes, or ask for less: n, max_tokens, logprobs."
    )
    too_much = (
        "The server holds too many unsent answers, and this was the largest "
        "(max_total_unsent_bytes). Read a stream as it comes, or try again later."
    )
    return Budget(
        settings.max_unsent_bytes,
        settings.max_total_unsent_bytes,
        too_large=partial(ApiError, 400, too_large, code="answer_too_large"),
        too_much=partial(busy, 503, too_much, "overloaded", RETRY_AFTER_SECONDS),
    )


def _route(scope: Scope) -> str | None:
    """The template of the path, such as `/v1/models/{id:path}`: the router notes its choice."""
    route = scope.get("route")
    return route.path if isinstance(route, Route) else None


def _access_line(scope: Scope, record: RequestRecord, seconds: float) -> str:
    """A line of the access log. The path goes in as it was sent, percent-encoded, so that it cannot
    forge a line.
    """
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
