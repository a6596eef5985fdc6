"""Server-sent events: framing, keep-alives, and an end of the work when the client leaves."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from anyio import move_on_after
from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.api import Engine, EngineError
from engine.types import OutputEvent, Request
from server.errors import ApiError, ClientLeft, to_api_error
from server.generation.events import Events, UsageMeter, client_waiting, generating
from server.middleware import request_record
from server.transport.unsent import Unsent, unsent_of

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
HEADERS = {
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would hold events back
}

log = logging.getLogger("rootstock.stream")


class ChunkRenderer(Protocol):
    """Turns a request's events into the chunks of its answer."""

    def chunks(self, choice: int, event: OutputEvent) -> Iterable[BaseModel]: ...

    def last_chunks(self) -> Iterable[BaseModel]:
        """What follows when every choice has finished."""
        ...


def frame(chunk: BaseModel) -> bytes:
    """One event. Keys that were not set are left out; nulls that were set are sent."""
    return b"data: " + chunk.model_dump_json(exclude_unset=True).encode() + b"\n\n"


def frames(chunks: Iterable[BaseModel]) -> bytes:
    return b"".join(map(frame, chunks))


class EventStreamResponse(Response):
    """Streams what the engine generates.

    The status line waits for the first event, so that a refusal has a status of its own, but no
    longer than `keepalive_seconds`. After it, errors are events.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        engine: Engine,
        requests: Sequence[Request],
        renderer: ChunkRenderer,
        meter: UsageMeter,
        keepalive_seconds: float,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers(HEADERS)
        self._engine = engine
        self._requests = requests
        self._renderer = renderer
        self._meter = meter
        self._keepalive_seconds = keepalive_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = request_record(scope)
        body = _Body(send, {"status": self.status_code, "headers": self.raw_headers})
        try:
            await self._stream(receive, body, unsent_of(scope))
            record.usage = self._meter.total
        except ClientLeft:
            pass  # RequestLog has seen it leave
        except Exception as error:
            if not body.started:
                raise
            expected = isinstance(error, ApiError | EngineError)
            log.warning("request %s: %s", record.id, error, exc_info=not expected)
            await body.write(frame(to_api_error(error).content))
        await body.close()

    async def _stream(self, receive: Receive, body: "_Body", unsent: Unsent) -> None:
        async with client_waiting(receive):
            async with generating(self._engine, self._requests, unsent) as events:
                while (data := await self._next(events)) is not None:
                    await body.write(data)
            await body.write(frames(self._renderer.last_chunks()) + DONE)

    async def _next(self, events: Events) -> bytes | None:
        """The next frames, a comment if there are none in time, None after the last."""
        with move_on_after(self._keepalive_seconds):
            async for choice, event in events:
                self._meter.add(choice, event.usage)
                if data := frames(self._renderer.chunks(choice, event)):
                    return data
            return None
        return KEEP_ALIVE


class _Body:
    """A response body whose status line goes out with its first bytes."""

    def __init__(self, send: Send, start: Mapping[str, object]) -> None:
        self._send = send
        self._start = start
        self.started = False

    async def write(self, data: bytes) -> None:
        if not data:
            return
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", **self._start})
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def close(self) -> None:
        if self.started:
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})
