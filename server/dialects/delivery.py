"""Sends what a ResponseBuilder makes, whole or as a stream, in any dialect, once the model is
loaded.

While it loads, a stream gets keep-alives. A client that disconnects ends the wait and the
generation. Nothing of the request's body is held while the answer is written.
"""

from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.values.output import OutputEvent
from server.activity.tracker import RequestTracker
from server.budget import Reservation
from server.dialects.base import (
    ResponseBuilder,
    StreamingBuilder,
    StreamWriter,
    generate_all,
    wire_json,
)
from server.dialects.errors import error_event
from server.errors import to_api_error
from server.generation.events import ChoiceEvent, ChoiceT, UsageMeter, generating
from server.generation.models import ServedModel
from server.http.stream import EVENT_STREAM, KEEP_ALIVE, DeferredStream, client_waiting
from server.http.unsent import rendering_bytes
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
    own = await service.chosen(name, record)
    if keep_alive is None or service.models.is_ready(own):
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


async def respond(builder: StreamingBuilder[ChoiceT], http: Request, service: Service) -> Response:
    """A stream, or the whole response where the client asks for that. Sending it raises what that
    of `respond_whole` does.
    """
    if not builder.is_streamed:
        return await respond_whole(builder, http, service)
    record, keepalive_seconds = request_record(http.scope), service.settings.keepalive_seconds
    return streamed(builder, record, service.tracker, keepalive_seconds)


async def respond_whole(
    builder: ResponseBuilder[ChoiceT], http: Request, service: Service
) -> Response:
    """The whole response, generated when it is sent. Sending it raises what the engine raises, and
    ApiError when the answer grows too large.
    """
    return WholeResponse(builder, service)


class WholeResponse(Response):
    """A response that is generated, and rendered in a worker thread, when it is sent."""

    def __init__(self, builder: ResponseBuilder[ChoiceT], service: Service) -> None:
        self.background = None
        self._builder = builder
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record, builder = request_record(scope), self._builder
        record.end_preparation()
        output = output_of(record)
        async with client_waiting(receive):
            choices = await generate_all(builder, output, record, self._service.tracker)
            record.usage = builder.meter.total
            body = await self._service.workers.run(
                record.client, rendering_bytes(output.n_bytes), partial(builder.whole, choices)
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
    builder: StreamingBuilder[ChoiceT],
    record: RequestRecord,
    tracker: RequestTracker,
    keepalive_seconds: float,
) -> DeferredStream:
    """The response as a stream of what the engine generates."""
    writer = builder.writer()

    async def fill(stream: DeferredStream) -> None:
        stream.keep_alive = writer.keep_alive  # another one's, where the model had to be loaded
        stream.failure = lambda error: writer.failure(to_api_error(error))
        record.end_preparation()
        output = output_of(record)
        async with generating(builder.engine, builder.requests, output, record, tracker) as events:
            async for batch in events:
                await stream.write(rendered(writer, batch, output, builder.meter))
        record.usage = builder.meter.total
        await stream.write(writer.end())

    return DeferredStream(writer.media_type, fill, keepalive_seconds, keep_alive=writer.keep_alive)


def rendered(
    writer: StreamWriter, batch: Sequence[ChoiceEvent], output: Reservation, meter: UsageMeter
) -> bytes:
    """The events of a batch as bytes. Raises ApiError when the writer keeps too much of them."""
    by_choice = defaultdict[int, list[OutputEvent]](list)
    for choice, event in batch:
        meter.add(choice, event.usage)
        by_choice[choice].append(event)
    output.add(writer.kept_bytes([event for _, event in batch]))
    return b"".join(writer.events(choice, events) for choice, events in by_choice.items())
