"""Sends what a ResponseBuilder makes, whole or as a stream, in any dialect.

A client that disconnects ends the generation.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from anyio import current_time, sleep_until
from pydantic import BaseModel
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.api import EngineError
from engine.values.output import OutputEvent
from server.activity.tracker import RequestTracker
from server.dialects.base import (
    ResponseBuilder,
    StreamingBuilder,
    StreamWriter,
    generate_all,
    wire_json,
)
from server.errors import ApiError, ClientLeft, timed_out, to_api_error
from server.generation.events import ChoiceEvent, ChoiceT, MergedEvents, generating
from server.record import RequestRecord, request_record
from server.service import Service
from server.transport.unsent import Unsent, rendering_bytes, unsent_of
from server.transport.waiting import client_waiting, task_scope

STREAM_HEADERS = {
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would hold events back
}

log = logging.getLogger("rootstock.stream")


async def respond(
    builder: StreamingBuilder[ChoiceT], http: HttpRequest, service: Service
) -> Response:
    """A stream, or the whole response where the client asks for that. Raises what `respond_whole`
    does.
    """
    if not builder.is_streamed:
        return await respond_whole(builder, http, service)
    request_record(http.scope).slot.release()
    keepalive_seconds = service.settings.keepalive_seconds
    return EventStreamResponse(builder, service.tracker, keepalive_seconds)


async def respond_whole(
    builder: ResponseBuilder[ChoiceT], http: HttpRequest, service: Service
) -> Response:
    """Raises what the engine raises, and ApiError when the answer grows too large."""
    record, unsent = request_record(http.scope), unsent_of(http.scope)
    record.slot.release()
    choices = await generate_all(builder, unsent, record, service.tracker)
    record.usage = builder.meter.total
    body = await service.workers.run(
        record.client, rendering_bytes(unsent), partial(builder.whole, choices)
    )
    return json_response(body)


async def respond_without_engine(
    build: Callable[[], BaseModel], n_bytes: int, http: HttpRequest, service: Service
) -> Response:
    """A response that may be long, and takes about `n_bytes` of memory: built in a worker thread.

    Raises ApiError when that is too much.
    """
    unsent = unsent_of(http.scope)
    with unsent.ended_by(_raised_by_add):
        unsent.add(n_bytes)
    record = request_record(http.scope)
    record.slot.release()
    body = await service.workers.run(
        record.client, rendering_bytes(unsent), lambda: wire_json(build())
    )
    return json_response(body)


def _raised_by_add(error: ApiError) -> None:
    """An Overrun that does nothing: `Unsent.add` raises the error itself."""


def json_response(body: bytes) -> Response:
    return Response(body, media_type="application/json")


class EventStreamResponse(Response):
    """Streams what the engine generates.

    The status line waits for the first event, so that an error before it has a status of its own,
    but no longer than `keepalive_seconds`. After it, errors are part of the stream.
    """

    def __init__(
        self,
        builder: StreamingBuilder[ChoiceT],
        tracker: RequestTracker,
        keepalive_seconds: float,
    ) -> None:
        self.status_code = 200
        self.background = None
        self._builder = builder
        self._writer = builder.writer()
        self.media_type = self._writer.media_type
        self.init_headers(STREAM_HEADERS)
        self._tracker = tracker
        self._keepalive_seconds = keepalive_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = request_record(scope)
        body = _Body(send, {"status": self.status_code, "headers": self.raw_headers})
        writer = self._writer
        try:
            await self._stream(writer, receive, body, unsent_of(scope), record)
            record.usage = self._builder.meter.total
        except ClientLeft:
            pass  # RequestLog has seen it leave
        except Exception as error:
            if not body.started:
                raise
            expected = isinstance(error, ApiError | EngineError)
            log.warning("request %s: %s", record.id, error, exc_info=not expected)
            await body.write(writer.failure(to_api_error(error)))
        await body.close()

    async def _stream(
        self,
        writer: StreamWriter,
        receive: Receive,
        body: "_Body",
        unsent: Unsent,
        record: RequestRecord,
    ) -> None:
        engine, requests = self._builder.engine, self._builder.requests
        async with client_waiting(receive):
            async with (
                generating(engine, requests, unsent, record, self._tracker) as events,
                task_scope() as tasks,
            ):
                tasks.start_soon(self._wake, events, body)
                tasks.start_soon(_end_at, record.deadline, events)
                async for batch in events:
                    data = self._rendered(writer, batch, unsent) if batch else writer.keep_alive()
                    await body.write(data)
            await body.write(writer.end())

    def _rendered(
        self, writer: StreamWriter, batch: Sequence[ChoiceEvent], unsent: Unsent
    ) -> bytes:
        """The events of a batch as bytes. Raises ApiError when the writer keeps too much."""
        by_choice = defaultdict[int, list[OutputEvent]](list)
        for choice, event in batch:
            self._builder.meter.add(choice, event.usage)
            by_choice[choice].append(event)
        unsent.add(writer.kept_bytes([event for _, event in batch]))
        return b"".join(writer.events(choice, events) for choice, events in by_choice.items())

    async def _wake(self, events: MergedEvents, body: "_Body") -> None:
        """Have a keep-alive sent after each silence. One timer, not one for each write."""
        while True:
            due = body.written_seconds + self._keepalive_seconds
            if due <= current_time():
                events.wake()
                due = current_time() + self._keepalive_seconds
            await sleep_until(due)


async def _end_at(deadline: float, events: MergedEvents) -> None:
    """At the deadline, replace the events that wait by an error."""
    await sleep_until(deadline)
    events.overrun(timed_out())


class _Body:
    """A response body whose status line goes out with its first bytes."""

    def __init__(self, send: Send, start: Mapping[str, object]) -> None:
        self._send = send
        self._start = start
        self.started = False
        self.written_seconds = current_time()  # when there was something to write, or the beginning

    async def write(self, data: bytes) -> None:
        if not data:
            return
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", **self._start})
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self.written_seconds = current_time()

    async def close(self) -> None:
        if self.started:
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})
