"""A Job, which a dialect makes of each request. Its response is sent whole or by a StreamWriter,
once the model is loaded.

While it loads, a stream gets keep-alives. A client that disconnects ends the wait and the
generation. The body of the request is released before the response is written.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jiter
from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.values.model import Tokenizer
from engine.values.output import OutputEvent
from engine.values.request import Request
from server.activity import RequestTracker
from server.dialects.errors import error_event
from server.errors import ApiError, to_api_error
from server.fairness import Reservation
from server.generation.choice import AnswerUsage, Choice, Step, answer_usage
from server.generation.plan import AnswerPlan
from server.generation.requests import ServedModel
from server.generation.stream import Batch, generating, kept_bytes, rendering_bytes
from server.http.stream import EVENT_STREAM, KEEP_ALIVE, DeferredStream, client_waiting
from server.parsing.json_text import whole_characters
from server.record import RequestRecord, output_of, request_record
from server.service import RequestContext, Service


def wire_json(body: BaseModel) -> bytes:
    """The body as it is: it was built from typed values, so nothing validates it again.

    Keys that were not set are left out; nulls that were set are sent.
    """
    return body.model_dump_json(exclude_unset=True).encode()


class StreamWriter(ABC):
    """One streamed response as bytes. Empty bytes: there is nothing to send yet.

    The status line goes out with the first bytes. Until then an error has a status of its own.
    """

    media_type: str

    @abstractmethod
    def write(self, choice: int, steps: Sequence[Step]) -> bytes:
        """The next steps of one choice, perhaps none. Called after each growth of its output, and
        when it has finished.
        """

    def kept_bytes(self, events: Sequence[OutputEvent]) -> int:
        """The memory that it keeps of the events until its end, rendering included."""
        return 0

    @abstractmethod
    def keep_alive(self) -> bytes:
        """The keep-alive of a silent stream, so that no client or proxy times out."""

    @abstractmethod
    def failure(self, error: ApiError) -> bytes:
        """The end of a response that failed after it had begun."""

    @abstractmethod
    def end(self, usage: AnswerUsage) -> bytes:
        """The end of a response, when every choice has finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The engine requests of a client's request, and how their results become its response.

    It lives as long as the answer. It does not hold the request's body, which may be large.
    """

    model: ServedModel
    requests: Sequence[Request]
    render: Callable[[Sequence[Choice], AnswerUsage], bytes]
    """Makes the whole response, as JSON. Called in a worker thread: it may be long."""
    writer: Callable[[Sequence[Choice]], StreamWriter] | None = None
    """Makes the writer of a stream of these choices. None: the response is sent whole."""
    plan: AnswerPlan | None = None  # None: all text is content
    tokenizer: Tokenizer | None = None  # where blocks keep the log-probabilities of their text

    def choices(self) -> list[Choice]:
        """An empty answer for each sequence, in the order of the requests."""
        return [
            Choice(self.plan, remember, self.tokenizer)
            for request in self.requests
            for remember in [partial(self.model.replays.remember, request.cache_salt)] * request.n
        ]

    def usage(self, choices: Sequence[Choice]) -> AnswerUsage:
        """The usage of all choices of the response."""
        return answer_usage(choices, self.requests[0].n)


async def generate_all(
    job: Job, output: Reservation, record: RequestRecord, tracker: RequestTracker
) -> list[Choice]:
    """All sequences, complete, in order. Raises ApiError where they are too large."""
    choices = job.choices()
    with generating(job.model.engine, job.requests, output, record, tracker) as inbox:
        async for batch in inbox:
            for index, events in batch.items():
                output.add(sum(map(kept_bytes, events)))
                choices[index].feed(events)
    record.usage = job.usage(choices)
    return choices


def as_arguments(text: str) -> dict[str, Any]:
    """The arguments of a call as an object; of one that was cut off, as much as there is."""
    try:
        value = jiter.from_json(whole_characters(text).encode(), partial_mode=True)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


MakeJob = Callable[[ServedModel], Awaitable[Job | bytes]]
"""Makes the job when the model is there, or the JSON of a response that needs no engine. Raises
what there is to say to the client.
"""


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """The keep-alives of a stream while its model loads."""

    media_type: str
    part: Callable[[], bytes]  # which clients pass over


COMMENTS = KeepAlive(EVENT_STREAM, lambda: KEEP_ALIVE)


async def when_loaded(
    name: str, make: MakeJob, context: RequestContext, keep_alive: KeepAlive | None = None
) -> Response:
    """The response of the model of that name, once it is loaded. `keep_alive` is given where the
    client reads a stream, which it keeps alive until then.

    A client that leaves before the job is made ends the wait for the model, the preparation and
    the generation. Raises ApiError, EngineStopped, ClientDisconnected and what `make` raises.
    """
    http, record, service = context.http, context.record, context.service
    model = await service.chosen(name, record)
    if keep_alive is None or model.is_ready:
        async with client_waiting(http.receive):
            return respond(await make(await service.hold(name, record)), context)

    async def fill(stream: DeferredStream) -> None:
        nonlocal make
        response = respond(await make(await service.hold(name, record)), context)
        del make  # it holds the body
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


def respond(job: Job | bytes, context: RequestContext) -> Response:
    """A stream if the job has a writer, else the whole response. Sending it raises the engine's
    errors, and ApiError when a whole answer grows too large.
    """
    if isinstance(job, bytes):
        return json_response(job)
    if job.writer is None:
        return WholeResponse(job, context.service)
    choices = job.choices()
    writer, service = job.writer(choices), context.service
    tracker, keepalive_seconds = service.tracker, service.settings.keepalive_seconds
    return streamed(job, choices, writer, context.record, tracker, keepalive_seconds)


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
    build: Callable[[], BaseModel], n_bytes: int, context: RequestContext
) -> Response:
    """A response that may be long, and takes about `n_bytes` of memory: built in a worker thread.

    Raises ApiError when that is too much.
    """
    record = context.record
    output_of(record).add(n_bytes)
    record.slot.release()
    body = await context.service.workers.run(
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
    """The response as a stream of generated output."""

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
