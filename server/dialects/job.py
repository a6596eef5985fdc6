"""A Job, which a dialect makes of each request. Its response is sent whole or by a StreamWriter,
once the model is loaded.

While it loads, a stream gets keep-alives. A client that disconnects ends the wait and the
generation. Until a worker makes the job of it, the body of the request is bytes.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.responses import Response

from engine.values.model import Tokenizer
from engine.values.output import OutputEvent
from engine.values.request import Request
from server.activity import RequestTracker
from server.dialects.error_shapes import error_event
from server.errors import ApiError, to_api_error
from server.fairness import Reservation
from server.generation.choice import AnswerUsage, Choice, Remember, Step, answer_usage
from server.generation.images import UnpreparedImages
from server.generation.plan import AnswerPlan, grammar_bytes
from server.generation.progress import ProgressBody, PromptProgress
from server.generation.requests import ServedModel
from server.generation.stream import (
    EventsByIndex,
    generating,
    kept_bytes,
    rendering_bytes,
)
from server.generation.tools import UNREADABLE, arguments_object
from server.http.stream import EVENT_STREAM, KEEP_ALIVE, DeferredStream, client_waiting
from server.record import RequestRecord, output_of
from server.service import ArrivedBody, Prepare, RequestContext

BodyT = TypeVar("BodyT", bound=BaseModel)

log = logging.getLogger("rootstock.dialects")


def wire_json(body: BaseModel) -> bytes:
    """The body as it is: it was built from typed values, so nothing validates it again."""
    return body.model_dump_json().encode()


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
    def progress(self, body: ProgressBody) -> bytes:
        """How much of the prompt is read. Called before the first of the output."""

    @abstractmethod
    def keep_alive(self) -> bytes:
        """The keep-alive of a silent stream, so that no client or proxy times out."""

    @abstractmethod
    def failure(self, error: ApiError) -> bytes:
        """The end of a response that failed after it had begun."""

    @abstractmethod
    def end(self, usage: AnswerUsage) -> bytes:
        """The end of a response, when every choice has finished."""


REQUEST_BYTES = 1500
"""A request of the engine and its empty choice, without their prompt: 710 and 790 bytes, measured
on Python 3.11. A body may have thousands."""


def remembering(model: ServedModel, request: Request) -> Remember | None:
    """Remembers answers with calls to the request, unless nothing of it is to be kept."""
    if request.shared_tokens == 0:
        return None
    return partial(model.replays.remember, request.cache_salt)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The engine requests of a client's request, and how their results become its response.

    It lives as long as the answer.
    """

    model: ServedModel
    requests: Sequence[Request]
    render: Callable[[Sequence[Choice], AnswerUsage], bytes]
    """Makes the whole response, as JSON. Called in a worker thread: it may be long."""
    writer: Callable[[Sequence[Choice]], StreamWriter] | None = None
    """Makes the writer of a stream of these choices. None: the response is sent whole."""
    plan: AnswerPlan | None = None  # None: all text is content
    tokenizer: Tokenizer | None = None  # where blocks keep the log-probabilities of their text
    form_bytes: int = 0  # of the body, and of what it names, that `render` and `writer` keep
    after: Mapping[str, str] = field(default_factory=dict)
    """The id of the request that has to end before another begins, by the id of that."""
    count: Callable[[Sequence[Choice]], AnswerUsage] | None = None
    """The usage, where prompts share what counts once. None: each prompt counts by itself."""

    @property
    def kept_bytes(self) -> int:
        """What it keeps of the body, and of what that names, until the answer's end."""
        functions = self.plan.functions.values() if self.plan else ()
        constraints = {id(request.constraint): request.constraint for request in self.requests}
        return (
            self.form_bytes
            + sum(map(len, functions))
            + sum(map(grammar_bytes, constraints.values()))
            + sum(len(one.prompt.packed) + len(one.prediction.packed) for one in self.requests)
            + REQUEST_BYTES * len(self.requests)
        )

    def choices(self) -> list[Choice]:
        """An empty answer for each sequence, in the order of the requests."""
        return [
            Choice(self.plan, remember, self.tokenizer)
            for request in self.requests
            for remember in [remembering(self.model, request)] * request.n
        ]

    def usage(self, choices: Sequence[Choice]) -> AnswerUsage:
        """The usage of all choices of the response."""
        if self.count is not None:
            return self.count(choices)
        return answer_usage(choices, self.requests[0].n)


async def generate_all(
    job: Job, output: Reservation, record: RequestRecord, tracker: RequestTracker
) -> list[Choice]:
    """All sequences, complete, in order. Raises ApiError where they are too large."""
    choices = job.choices()
    with generating(job.model.engine, job.requests, output, record, tracker, job.after) as inbox:
        async for batch in inbox:
            for index, events in batch.items():
                output.add(sum(map(kept_bytes, events)))
                choices[index].feed(events)
    record.usage = usage = job.usage(choices)
    if job.count is not None:  # the tracker has counted each prompt by itself
        record.tokens = usage.prompt_tokens + usage.completion_tokens
    return choices


def as_arguments(text: str) -> dict[str, Any]:
    """The arguments of a call as an object; of one that was cut off, as much as there is. Text that
    is none is a member called UNREADABLE.
    """
    value = arguments_object(text, "on")
    if value is not None:
        return value
    log.warning("a call's arguments are no JSON object: %d characters of text", len(text))
    return {UNREADABLE: text}


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """The keep-alives of a stream while its model loads."""

    media_type: str
    part: Callable[[], bytes]  # which clients pass over


COMMENTS = KeepAlive(EVENT_STREAM, lambda: KEEP_ALIVE)


class Postponed(Exception):
    """What is to be made takes long, and a stream has to begin first: `make` is called again then.
    Raised only where the body `postpones`.
    """


MakeJob = Callable[[ServedModel], Awaitable[Job | bytes]]
"""Makes the job when the model is held, or the JSON of a response that needs no engine, and
replaces the body. Raises what there is to say to the client.
"""


async def respond(
    body: ArrivedBody[BodyT],
    context: RequestContext,
    prepare: Prepare[BodyT, Job | bytes],
    keep_alive: KeepAlive | None = None,
    name: str | None = None,
) -> Response:
    """The response of the model that the body names, or else of `name`; see `respond_with`.
    `prepare` is called in a worker, once the model is held.
    """

    async def make(model: ServedModel) -> Job | bytes:
        job = await body.run(lambda parsed: prepare(parsed, model, context.record))
        body.replace(job.kept_bytes if isinstance(job, Job) else 0)
        return job

    return await respond_with(body, context, make, keep_alive, name)


async def respond_with(
    body: ArrivedBody[Any],
    context: RequestContext,
    make: MakeJob,
    keep_alive: KeepAlive | None = None,
    name: str | None = None,
) -> Response:
    """The response, whole, or as a stream where there is a `keep_alive`. While the model of a
    stream loads, that is sent.

    A client that leaves ends the wait for the model, the preparation and the generation. Raises
    ApiError, EngineError, ClientDisconnected and what `make` raises.
    """
    http, service = context.http, context.service
    async with client_waiting(http.receive):
        model = await body.find(name)
        made: Job | bytes | None = None
        if keep_alive is None or model.is_ready:
            made = await _made_at_once(body, make, name, is_streamed=keep_alive is not None)
        if isinstance(made, bytes):
            return json_response(made)
        if keep_alive is None:
            assert made is not None, "only a stream waits for its images"
            return json_response(await whole(made, context))
        if made is not None:
            fill = partial(write_stream, job=made, context=context)
        else:
            fill = partial(_load_and_write, body, context, make, name)
    return DeferredStream(
        keep_alive.media_type,
        fill,
        service.settings.keepalive_seconds,
        keep_alive=keep_alive.part,
        failure=partial(error_event, http.scope),
    )


async def _made_at_once(
    body: ArrivedBody[Any], make: MakeJob, name: str | None, *, is_streamed: bool
) -> Job | bytes | None:
    """What `make` makes. None for a stream that has to wait for its images, or for what `make` has
    postponed: it gets keep-alives meanwhile.
    """
    model = await body.hold(name)
    body.postpones = is_streamed
    try:
        return await make(model)
    except (UnpreparedImages, Postponed):
        return None
    finally:
        body.postpones = False


async def _load_and_write(
    body: ArrivedBody[Any],
    context: RequestContext,
    make: MakeJob,
    name: str | None,
    stream: DeferredStream,
) -> None:
    made = await make(await body.hold(name))
    if isinstance(made, bytes):
        http = context.http
        await json_response(made)(http.scope, http.receive, stream.send)
    else:
        await write_stream(stream, made, context)


async def whole(job: Job, context: RequestContext) -> bytes:
    """The whole response, rendered in a worker. Raises the engine's errors, and ApiError where it
    grows too large.
    """
    record, service = context.record, context.service
    output = output_of(record)
    choices = await generate_all(job, output, record, service.tracker)
    render = partial(job.render, choices, job.usage(choices))
    return await service.workers.run(record.client, rendering_bytes(output.n_bytes), render)


def json_response(body: bytes) -> Response:
    return Response(body, media_type="application/json")


async def write_stream(stream: DeferredStream, job: Job, context: RequestContext) -> None:
    """Write the response as it is generated."""
    assert job.writer is not None, "a stream has a writer"
    record, output, choices = context.record, output_of(context.record), job.choices()
    writer = job.writer(choices)
    stream.keep_alive = writer.keep_alive
    stream.failure = lambda error: writer.failure(to_api_error(error))
    progress = PromptProgress(job.requests) if job.requests[0].reports_progress else None
    tracker = context.service.tracker
    with generating(job.model.engine, job.requests, output, record, tracker) as inbox:
        async for batch in inbox:
            await stream.write(rendered(batch, choices, writer, output, progress))
    record.usage = usage = job.usage(choices)
    await stream.write(writer.end(usage))


def rendered(
    batch: EventsByIndex,
    choices: Sequence[Choice],
    writer: StreamWriter,
    output: Reservation,
    progress: PromptProgress | None = None,
) -> bytes:
    """The events of a batch as bytes, after the `progress` of the prompts where the client asks for
    it. Raises ApiError when the writer keeps too much of them.
    """
    fed = dict[int, list[Step]]()
    for index, events in batch.items():
        if n_bytes := writer.kept_bytes(events):
            output.add(n_bytes)
        fed[index] = choices[index].feed(events)
    written = list[bytes]()
    if progress is not None and progress.note(chain.from_iterable(batch.values())):
        written.append(writer.progress(progress.body()))
    written += [
        writer.write(index, steps)
        for index, steps in fed.items()
        if choices[index].first_output_ns is not None  # until then an error has its own status
    ]
    return b"".join(written)
