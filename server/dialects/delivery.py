"""Sends the response of a Job, whole or as a stream, in any dialect, once the model is loaded.

While it loads, a stream gets keep-alives. A client that disconnects ends the wait and the
generation.
"""

import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from anyio import current_time, sleep, sleep_until
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from engine.api import EngineError
from engine.values.output import OutputEvent
from server.activity.tracker import RequestTracker
from server.dialects.base import Job, generate_all, wire_json
from server.dialects.errors import error_event
from server.errors import ApiError, ClientLeft, timed_out, to_api_error
from server.generation.events import ChoiceEvent, MergedEvents, generating
from server.generation.models import ServedModel
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
            async with (
                generating(engine, requests, unsent, record, self._tracker) as events,
                task_scope() as tasks,
            ):
                tasks.start_soon(self._wake, events, body)
                tasks.start_soon(_end_at, record.deadline, events)
                async for batch in events:
                    await body.write(
                        self._rendered(batch, unsent) if batch else self._writer.keep_alive()
                    )
            record.usage = usage = self._job.usage(self._choices)
            await body.write(self._writer.end(usage))

    def _rendered(self, batch: Sequence[ChoiceEvent], unsent: Unsent) -> bytes:
        """The events of a batch as bytes. Raises ApiError when the writer keeps too much."""
        by_choice = defaultdict[int, list[OutputEvent]](list)
        for index, event in batch:
            by_choice[index].append(event)
        unsent.add(self._writer.kept_bytes([event for _, event in batch]))
        written = list[bytes]()
        for index, events in by_choice.items():
            choice = self._choices[index]
            steps = choice.feed(events)
            if choice.first_output_ns is not None:  # until then an error has a status of its own
                written.append(self._writer.write(index, steps))
        return b"".join(written)

    async def _wake(self, events: MergedEvents, body: "DeferredStart") -> None:
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
    own = await service.chosen(name, record)
    if keep_alive is not None and not service.models.known[own].is_ready:
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
        self.written_seconds = current_time()  # of the last bytes, or of the beginning

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
            self.written_seconds = current_time()

    async def end(self) -> None:
        """End the response if it has begun."""
        if self.is_sent:
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})
