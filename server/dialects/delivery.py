"""Sends the response of a Job, whole or as a stream, in any dialect, once the model is loaded.

While it loads, a stream gets keep-alives. A client that disconnects ends the wait and the
generation.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic

from anyio import sleep, sleep_until
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from engine.api import EngineError
from server.activity.tracker import RequestTracker
from server.dialects.base import Job, generate_all, wire_json
from server.dialects.errors import error_event
from server.errors import ApiError, ClientLeft, timed_out, to_api_error
from server.generation.models import ServedModel
from server.generation.stream import Batch, Inbox, generating
from server.http.sse import EVENT_STREAM, KEEP_ALIVE
from server.http.unsent import Unsent, rendering_bytes, unsent_of
from server.http.waiting import client_waiting, task_scope
from server.record import RequestRecord, request_record
from server.service import Service

STREAM_HEADERS = {
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would hold events back
}

Begin = Callable[[ServedModel], Awaitable[Response]]
"""Makes the response when the model is there. Raises what there is to say to the client."""


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """What a stream is sent while its model loads."""

    media_type: str
    part: Callable[[], bytes]  # which clients pass over


COMMENTS = KeepAlive(EVENT_STREAM, lambda: KEEP_ALIVE)

log = logging.getLogger("rootstock.stream")


async def respond(job: Job, http: Request, service: Service) -> Response:
    """A stream where the job has a writer, else the whole response.

    Raises what the engine raises, and ApiError when a whole answer grows too large.
    """
    record, unsent = request_record(http.scope), unsent_of(http.scope)
    record.slot.release()
    if job.writer is not None:
        return EventStreamResponse(job, service.tracker, service.settings.keepalive_seconds)
    choices = await generate_all(job, unsent, record, service.tracker)
    body = await service.workers.run(
        record.client,
        rendering_bytes(unsent),
        partial(job.render, choices, job.usage(choices)),
    )
    return json_response(body)


async def respond_without_engine(
    build: Callable[[], BaseModel], n_bytes: int, http: Request, service: Service
) -> Response:
    """A response that may be long, and takes about `n_bytes` of memory: built in a worker thread.

    Raises ApiError when that is too much.
    """
    unsent = unsent_of(http.scope)
    with unsent.ended_by(_no_callback):
        unsent.add(n_bytes)
    record = request_record(http.scope)
    record.slot.release()
    body = await service.workers.run(
        record.client, rendering_bytes(unsent), lambda: wire_json(build())
    )
    return json_response(body)


def _no_callback(error: ApiError) -> None:
    """Does nothing when the limit is exceeded: `Unsent.add` raises the error itself."""


def json_response(body: bytes) -> Response:
    return Response(body, media_type="application/json")


class EventStreamResponse(Response):
    """Streams what the engine generates.

    The status line waits for the first event, so that an error before it has a status of its own,
    but no longer than `keepalive_seconds`. After it, errors are part of the stream.
    """

    def __init__(self, job: Job, tracker: RequestTracker, keepalive_seconds: float) -> None:
        """The job has a writer."""
        assert job.writer is not None
        self.status_code = 200
        self.background = None
        self._job = job
        self._choices = job.choices()
        self._writer = job.writer(self._choices)
        self.media_type = self._writer.media_type
        self.init_headers(STREAM_HEADERS)
        self._tracker = tracker
        self._keepalive_seconds = keepalive_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = request_record(scope)
        body = DeferredStart(send, self.raw_headers)
        try:
            await self._stream(receive, body, unsent_of(scope), record)
        except ClientLeft:
            pass  # RequestLog has seen it leave
        except Exception as error:
            if not body.is_sent:
                raise
            expected = isinstance(error, ApiError | EngineError)
            log.warning("request %s: %s", record.id, error, exc_info=not expected)
            await body.write(self._writer.failure(to_api_error(error)))
        await body.end()

    async def _stream(
        self, receive: Receive, body: "DeferredStart", unsent: Unsent, record: RequestRecord
    ) -> None:
        engine, requests = self._job.model.engine, self._job.requests
        async with client_waiting(receive):
            with generating(engine, requests, unsent, record, self._tracker) as inbox:
                async with task_scope() as tasks:
                    tasks.start_soon(self._wake, inbox, body)
                    tasks.start_soon(_end_at, record.deadline, inbox)
                    async for batch in inbox:
                        data = self._rendered(batch, unsent) if batch else self._writer.keep_alive()
                        await body.write(data)
            record.usage = usage = self._job.usage(self._choices)
            await body.write(self._writer.end(usage))

    def _rendered(self, batch: Batch, unsent: Unsent) -> bytes:
        """The events of a batch as bytes. Raises ApiError when the writer keeps too much."""
        written = list[bytes]()
        for index, events in batch.items():
            choice = self._choices[index]
            if n_bytes := self._writer.kept_bytes(events):
                unsent.add(n_bytes)
            steps = choice.feed(events)
            if choice.first_output_ns is not None:  # until then an error has a status of its own
                written.append(self._writer.write(index, steps))
        return b"".join(written)

    async def _wake(self, inbox: Inbox, body: "DeferredStart") -> None:
        """Have a keep-alive sent after each silence. One timer, not one for each write."""
        while True:
            due = body.written_seconds + self._keepalive_seconds
            if due <= monotonic():
                inbox.wake()
                due = monotonic() + self._keepalive_seconds
            await sleep_until(due)


async def _end_at(deadline: float, inbox: Inbox) -> None:
    """At the deadline, replace the events that wait by an error."""
    await sleep_until(deadline)
    inbox.abort_with(timed_out())


async def when_loaded(
    name: str,
    begin: Begin,
    http: Request,
    service: Service,
    keep_alive: KeepAlive | None = None,
) -> Response:
    """The response of the model of that name, once it is loaded. `keep_alive` is given where the
    client reads a stream, which it keeps alive until then.

    A client that leaves before the response is made ends the wait for the model, the preparation
    and the generation. Raises ApiError, EngineStopped, ClientLeft and what `begin` raises.
    """
    record = request_record(http.scope)
    model = await service.chosen(name, record)
    if keep_alive is not None and not model.is_ready:
        return LoadingStream(name, begin, service, keep_alive)
    async with client_waiting(http.receive):
        return await begin(await service.hold(name, record))


class LoadingStream(Response):
    """The status line waits for the response, so that it may be an error's, but no longer than
    `keepalive_seconds`. After it, an error is an event, a missed deadline included.
    """

    def __init__(self, name: str, begin: Begin, service: Service, keep_alive: KeepAlive) -> None:
        self.status_code = 200
        self.media_type = keep_alive.media_type
        self.background = None
        self.init_headers(STREAM_HEADERS)
        self._name = name
        self._begin = begin
        self._service = service
        self._keep_alive = keep_alive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        opening = DeferredStart(send, self.raw_headers)
        try:
            response = await self._response(scope, receive, opening)
            await response(scope, receive, opening.send)
        except ClientLeft:
            pass  # RequestLog has seen it leave
        except Exception as error:
            if not opening.is_sent:
                raise
            expected = isinstance(error, ApiError | EngineError)
            log.warning("request %s: %s", request_record(scope).id, error, exc_info=not expected)
            await opening.write(error_event(scope, error))
            await opening.end()

    async def _response(self, scope: Scope, receive: Receive, opening: "DeferredStart") -> Response:
        record = request_record(scope)
        with record.time_limit():  # that of TimeLimit ends with the first comment
            async with client_waiting(receive):
                async with task_scope() as tasks:
                    tasks.start_soon(self._comment, opening)
                    model = await self._service.hold(self._name, record)
                return await self._begin(model)

    async def _comment(self, opening: "DeferredStart") -> None:
        while True:
            await sleep(self._service.settings.keepalive_seconds)
            await opening.write(self._keep_alive.part())


class DeferredStart:
    """A response whose status line goes out with its first bytes."""

    def __init__(self, send: Send, headers: Sequence[tuple[bytes, bytes]]) -> None:
        self._send = send
        self._start: Message = {"type": "http.response.start", "status": 200, "headers": headers}
        self.is_sent = False
        self.written_seconds = monotonic()  # of the last bytes, or of the beginning

    async def send(self, message: Message) -> None:
        """Send a message of a response that takes this one's place, or goes on with it: without
        its own status line once there has been one.
        """
        if message["type"] != "http.response.start" or not self.is_sent:
            self.is_sent = True
            await self._send(message)

    async def write(self, data: bytes) -> None:
        if data:
            await self.send(self._start)
            await self._send({"type": "http.response.body", "body": data, "more_body": True})
            self.written_seconds = monotonic()

    async def end(self) -> None:
        """End the response if it has begun."""
        if self.is_sent:
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})
