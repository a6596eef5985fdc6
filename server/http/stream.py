"""Responses that are sent piece by piece: server-sent events, and lines of JSON (NDJSON)."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from typing import TypeAlias

from anyio import create_task_group, get_cancelled_exc_class, sleep
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint_if_cancelled
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from engine.api import EngineError
from server.errors import ApiError, ClientDisconnected
from server.record import request_record

EVENT_STREAM = "text/event-stream"
NDJSON = "application/x-ndjson"
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which clients ignore."""

STREAM_HEADERS = {
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would hold events back
}

_LINE_ENDS = tuple((char.encode(), f"\\u{ord(char):04x}".encode()) for char in "\x85\u2028\u2029")
"""Characters that JSON allows in strings and at which clients may split a text into lines, as
Python's `str.splitlines` and so httpx does. Each with its JSON escape.
"""

log = logging.getLogger("rootstock.stream")


def escape_line_ends(json: bytes) -> bytes:
    """The JSON text without characters that could be taken for the end of a line.

    They can only stand in strings, where an escape means the same.
    """
    for char, escape in _LINE_ENDS:
        json = json.replace(char, escape)
    return json


def sse_data(data: bytes) -> bytes:
    """An event without a name. The data is JSON, or text of ASCII, without line breaks."""
    return b"data: %b\n\n" % escape_line_ends(data)


def sse_event(name: str, data: bytes) -> bytes:
    """An event with a name. The data is JSON without line breaks."""
    return b"event: %b\n" % name.encode() + sse_data(data)


def json_line(json: bytes) -> bytes:
    """A line of an NDJSON stream. The JSON is without line breaks."""
    return escape_line_ends(json) + b"\n"


Fill: TypeAlias = Callable[["DeferredStream"], Awaitable[None]]
"""Writes the parts of a stream. Raises what there is to say to the client."""


class DeferredStream(Response):
    """A stream whose status line goes out with its first bytes: until then an error has its own
    status. Later errors, missed deadlines included, are the stream's last part.

    `fill` writes it. A client that disconnects ends `fill`. `keep_alive` makes what is sent after
    each silence of `keepalive_seconds`, and `failure` the part of an error; without it a stream
    that fails is cut off. `fill` may replace both.
    """

    def __init__(
        self,
        media_type: str,
        fill: Fill,
        keepalive_seconds: float,
        *,
        keep_alive: Callable[[], bytes] = lambda: KEEP_ALIVE,
        failure: Callable[[Exception], bytes] | None = None,
    ) -> None:
        self.status_code = 200
        self.media_type = media_type
        self.background = None
        self.init_headers(STREAM_HEADERS)
        self.fill = fill
        self.keep_alive = keep_alive
        self.failure = failure
        self._keepalive_seconds = keepalive_seconds
        self._send: Send
        self._is_begun = False
        self._is_writing = False
        self._silent_since = 0.0  # on the event loop's clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = request_record(scope)
        self._send = send
        self._now = asyncio.get_running_loop().time
        self._silent_since = self._now()
        try:
            with record.time_limit():
                async with client_waiting(receive) as tasks:
                    tasks.start_soon(until_cancelled, self._break_silence)
                    await self.fill(self)
        except ClientDisconnected:
            return  # the gateway has seen it leave
        except Exception as error:
            if not self._is_begun or self.failure is None:
                raise
            expected = isinstance(error, ApiError | EngineError)
            log.warning("request %s: %s", record.id, error, exc_info=not expected)
            await self.write(self.failure(error))
        if self._is_begun and not record.is_answered:
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def write(self, data: bytes) -> None:
        """Send a part of the stream, if it is not empty."""
        if not data:
            return
        if not self._is_begun:
            await self.send(
                {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            )
        self._is_writing = True
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self._is_writing = False
        self._silent_since = self._now()

    async def send(self, message: Message) -> None:
        """Send a message of a response that replaces or continues this one, without its status line
        if one was sent.
        """
        if message["type"] != "http.response.start":
            await self._send(message)
        elif not self._is_begun:
            await checkpoint_if_cancelled()  # Starlette takes what it passes on for sent
            self._is_begun = True
            await self._send(message)

    async def _break_silence(self) -> None:
        """Send keep-alives. One timer, and not one for each write."""
        while True:
            due = self._silent_since + self._keepalive_seconds
            if self._now() >= due:
                if not self._is_writing:
                    await self.write(self.keep_alive())
                self._silent_since = self._now()
                due = self._silent_since + self._keepalive_seconds
            await sleep(max(due - self._now(), 0))


def written(parts: AsyncGenerator[bytes, None]) -> Fill:
    """Writes the output of a generator."""

    async def fill(stream: DeferredStream) -> None:
        async with aclosing(parts):
            async for part in parts:
                await stream.write(part)

    return fill


@asynccontextmanager
async def client_waiting(receive: Receive) -> AsyncIterator[TaskGroup]:
    """Cancel the block as soon as the client disconnects, and raise ClientDisconnected. Gives a
    task group that ends with the block, as that of `task_scope` does.
    """
    client_left = False

    async def watch(tasks: TaskGroup) -> None:
        nonlocal client_left
        while (await receive())["type"] != "http.disconnect":
            pass
        client_left = True
        tasks.cancel_scope.cancel()

    async with task_scope() as tasks:
        tasks.start_soon(until_cancelled, watch, tasks)
        yield tasks
    if client_left:
        raise ClientDisconnected


@asynccontextmanager
async def task_scope() -> AsyncIterator[TaskGroup]:
    """A task group that is cancelled at its body's end, and raises the body's exception as it is.

    For tasks that raise nothing themselves. A plain group would put the body's exception into an
    ExceptionGroup. The two refer to each other, and the exception to all that its frames hold, such
    as a parsed body: all of it would be there until a full garbage collection, minutes later.
    """
    failure: Exception | None = None
    try:
        async with create_task_group() as tasks:
            try:
                yield tasks
            except Exception as error:
                failure = error
            tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure
    finally:
        del failure


async def until_cancelled(function: Callable[..., Awaitable[None]], *arguments: object) -> None:
    """Call an endless function as a task of a group, until it is cancelled.

    The task ends as one that returns: anyio's group keeps a cycle of the exception of a cancelled
    one, with all that its frames hold, until a full garbage collection.
    """
    with suppress(get_cancelled_exc_class()):
        await function(*arguments)
