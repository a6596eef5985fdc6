"""Sends the response of a Job, whole or as a stream, in any dialect, once the model is loaded.

While it loads, a stream gets keep-alives. A client that disconnects ends the wait and the
generation. Nothing of the request's body is held while the answer is written.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.activity import RequestTracker
from server.budget import Reservation
from server.dialects.base import Job, StreamWriter, generate_all, wire_json
from server.dialects.errors import error_event
from server.errors import to_api_error
from server.generation.choice import Choice
from server.generation.models import ServedModel
from server.generation.output_size import rendering_bytes
from server.generation.stream import Batch, generating
from server.http.stream import EVENT_STREAM, KEEP_ALIVE, DeferredStream, client_waiting
from server.record import RequestRecord, output_of, request_record
from server.service import Service

Begin = Callable[[ServedModel], Awaitable[Response]]
"""Makes the response when the model is there. Raises what there is to say to the client."""


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """What a stream is sent while its model loads."""

    media_type: str
    part: Callable[[], bytes]  # which clients pass over


COMMENTS = KeepAlive(EVENT_STREAM, lambda: KEEP_ALIVE)


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
    and the generation. Raises ApiError, EngineStopped, ClientDisconnected and what `begin` raises.
    """
    record = request_record(http.scope)
    model = await service.chosen(name, record)
    if keep_alive is None or model.is_ready:
        async with client_waiting(http.receive):
            return await begin(await service.hold(name, record))

    async def fill(stream: DeferredStream) -> None:
        nonlocal begin
        response = await begin(await service.hold(name, record))
        del begin  # it holds the body
        if isinstance(response, DeferredStream):
            await response.fill(stream)
        else:
            await response(http.scope, http.receive, stream.send)

    return DeferredStream(
        keep_alive.media_type,
        fill,
        service.settings.keepalive_seconds,
        keep_alive=keep_alive.part,
        failure=partial(error_event, http.scope),
    )


async def respond(job: Job, http: Request, service: Service) -> Response:
    """A stream where the job has a writer, else the whole response. Sending it raises what the
    engine raises, and ApiError when a whole answer grows too large.
    """
    if job.writer is None:
        return WholeResponse(job, service)
    choices = job.choices()
    writer = job.writer(choices)
    tracker, keepalive_seconds = service.tracker, service.settings.keepalive_seconds
    return streamed(job, choices, writer, request_record(http.scope), tracker, keepalive_seconds)


class WholeResponse(Response):
    """A response that is generated, and rendered in a worker thread, when it is sent: the handler
    and the body that it holds are gone by then.
    """

    def __init__(self, job: Job, service: Service) -> None:
        self.background = None
        self._job = job
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record, job = request_record(scope), self._job
        record.end_preparation()
        output = output_of(record)
        async with client_waiting(receive):
            choices = await generate_all(job, output, record, self._service.tracker)
            body = await self._service.workers.run(
                record.client,
                rendering_bytes(output.n_bytes),
                partial(job.render, choices, job.usage(choices)),
            )
        await json_response(body)(scope, receive, send)


async def respond_without_engine(
    build: Callable[[], BaseModel], n_bytes: int, http: Request, service: Service
) -> Response:
    """A response that may be long, and takes about `n_bytes` of memory: built in a worker thread.

    Raises ApiError when that is too much.
    """
    record = request_record(http.scope)
    output_of(record).add(n_bytes)
    record.slot.release()
    body = await service.workers.run(
        record.client, rendering_bytes(n_bytes), lambda: wire_json(build())
    )
    return json_response(body)


def json_response(body: bytes) -> Response:
    return Response(body, media_type="application/json")


def streamed(
    job: Job,
    choices: Sequence[Choice],
    writer: StreamWriter,
    record: RequestRecord,
    tracker: RequestTracker,
    keepalive_seconds: float,
) -> DeferredStream:
    """The response as a stream of what the engine generates."""

    async def fill(stream: DeferredStream) -> None:
        stream.keep_alive = writer.keep_alive  # another one's, where the model had to be loaded
        stream.failure = lambda error: writer.failure(to_api_error(error))
        record.end_preparation()
        output = output_of(record)
        with generating(job.model.engine, job.requests, output, record, tracker) as inbox:
            async for batch in inbox:
                await stream.write(rendered(batch, choices, writer, output))
        record.usage = usage = job.usage(choices)
        await stream.write(writer.end(usage))

    return DeferredStream(writer.media_type, fill, keepalive_seconds, keep_alive=writer.keep_alive)


def rendered(
    batch: Batch, choices: Sequence[Choice], writer: StreamWriter, output: Reservation
) -> bytes:
    """The events of a batch as bytes. Raises ApiError when the writer keeps too much of them."""
    written = list[bytes]()
    for index, events in batch.items():
        choice = choices[index]
        if n_bytes := writer.kept_bytes(events):
            output.add(n_bytes)
        steps = choice.feed(events)
        if choice.first_output_ns is not None:  # until then an error has a status of its own
            written.append(writer.write(index, steps))
    return b"".join(written)
