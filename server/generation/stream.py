"""The engine's events of one HTTP request, on their one hop from the engine to the answer, and
estimates of the memory that they take.
"""

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import MappingProxyType

from anyio.lowlevel import checkpoint

from engine.api import Engine, EngineStopped, Submission
from engine.values.output import FinishReason, OutputEvent, TokenLogprob
from engine.values.request import Request
from server.activity import RequestTracker
from server.errors import SERVER, ApiError, refused_field
from server.fairness import Reservation
from server.record import RequestRecord

# Bytes of memory on CPython 3.11, measured with tracemalloc and rounded up.
CHARACTER_BYTES = 4
EVENT_BYTES = 300  # an OutputEvent in a queue
LOGPROB_BYTES = 150  # a TokenLogprob without its alternatives
ALTERNATIVE_BYTES = 110  # an alternative of a TokenLogprob
RENDERED_LOGPROB_BYTES = 1000  # added for a TokenLogprob when a whole answer is rendered
RENDERED_ALTERNATIVE_BYTES = 800  # added for an alternative then
RENDERED_PROMPT_LOGPROB_BYTES = 650  # for a TokenLogprob of an echoed prompt: its shape is leaner
RENDERED_PROMPT_ALTERNATIVE_BYTES = 100  # for an alternative of one
RENDERED_PER_VECTOR_BYTE = 19  # numbers as Python objects, and as JSON

RENDER_TO_PARSE_COST = 16
"""Bytes that are rendered, logprobs included, in the time in which one byte of a body is parsed."""


def rendering_bytes(n_bytes: int) -> int:
    """The work of rendering output of n_bytes, in bytes of a body whose parsing takes as long."""
    return n_bytes // RENDER_TO_PARSE_COST


def queued_bytes(event: OutputEvent) -> int:
    """The memory of an event in a stream's queue."""
    return EVENT_BYTES + _held_bytes(event)


def kept_bytes(event: OutputEvent) -> int:
    """The memory of an event that is kept for a whole answer, rendering included."""
    output = _weighed(event.logprobs, RENDERED_LOGPROB_BYTES, RENDERED_ALTERNATIVE_BYTES)
    prompt = _weighed(
        event.prompt_logprobs,
        RENDERED_PROMPT_LOGPROB_BYTES,
        RENDERED_PROMPT_ALTERNATIVE_BYTES,
    )
    vector = RENDERED_PER_VECTOR_BYTE * len(event.pooled)
    return _held_bytes(event) + output + prompt + vector


def _held_bytes(event: OutputEvent) -> int:
    entries = (*event.logprobs, *event.prompt_logprobs)
    logprobs = _weighed(entries, LOGPROB_BYTES, ALTERNATIVE_BYTES)
    return CHARACTER_BYTES * len(event.text) + logprobs + len(event.pooled)


def _weighed(entries: Sequence[TokenLogprob | None], each: int, alternative: int) -> int:
    alternatives = sum(len(entry.top) for entry in entries if entry is not None)
    return each * len(entries) + alternative * alternatives


EventsByIndex = dict[int, list[OutputEvent]]
"""Events that have come, by the index of their choice in the response."""

EVENTS_AT_ONCE, ENTRIES_AT_ONCE = 256, 512
"""Limits for a batch, in events and in tokens with log-probabilities: a few milliseconds of
rendering. A slow client that reads at last delays the others for no longer.
"""

REQUESTS_AT_ONCE = 128
"""Limit for the requests of one HTTP request that the engine has at a time. The others are not
queued yet: many texts would fill the queue.
"""

CONTINUED_AT_ONCE = 32
"""Limit for the requests of one HTTP request that the engine has at a time, where some continue
others. It is low so that a request is queued soon after the one that it continues, while that one's
blocks are still cached.
"""


NO_ORDER: Mapping[str, str] = MappingProxyType({})
"""No request waits for another."""


class Inbox:
    """The events of some engine requests, for the one task that reads them. An EventSink.

    The engine waits for no client: the events of a slow one wait here. All but the first of them
    count as unsent. Iterating gives batches, and raises what any request raised.
    """

    def __init__(
        self,
        engine: Engine,
        requests: Sequence[Request],
        output: Reservation,
        after: Mapping[str, str] = NO_ORDER,
    ) -> None:
        """`after` has the request whose sequences must have ended before those of another begin,
        by their ids.
        """
        self._engine = engine
        self._output = output
        self._at_once = CONTINUED_AT_ONCE if after else REQUESTS_AT_ONCE
        self._later = deque(one for one in requests if one.id not in after)  # not submitted yet
        self._waiting = defaultdict[str, list[Request]](list)  # by the request that goes before
        for request in requests:
            if (before := after.get(request.id)) is not None:
                self._waiting[before].append(request)
        self._first_choice = {one.id: index * one.n for index, one in enumerate(requests)}
        self._live = {one.id: one.n for one in requests}  # sequences that have not ended
        self._submissions: dict[str, Submission] = {}
        self._queue: deque[tuple[OutputEvent, int]] = deque()  # with the bytes that were charged
        self._note: Callable[[OutputEvent], None]
        self._failure: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None

    @contextmanager
    def submitted(self, note: Callable[[OutputEvent], None]) -> Iterator[None]:
        """Have the requests computed while the block runs. `note` is called for each event as it
        comes.
        """
        self._note = note
        try:
            self._submit()
            yield
        finally:
            self._end_submissions()

    def put(self, event: OutputEvent) -> None:
        """See EventSink."""
        if self._failure is not None:
            return
        if event.finish_reason is not None and (failure := sequence_error(event)) is not None:
            self.fail(failure)
            return
        self._note(event)
        n_bytes = 0
        if self._queue:  # a backlog
            n_bytes = queued_bytes(event)
            if self._output.is_evicted:  # and the reader is being cancelled
                return
            with suppress(ApiError):
                self._output.add(n_bytes)
        self._queue.append((event, n_bytes))
        self._notify()

    def fail(self, error: BaseException) -> None:
        """Raise the error after the events that wait. The first error counts."""
        self._failure = self._failure or error
        self._notify()

    def __aiter__(self) -> "Inbox":
        return self

    async def __anext__(self) -> EventsByIndex:
        if self._queue:
            await checkpoint()  # a reader that never waits lets other tasks run
        while not self._queue:
            if self._failure is not None:
                raise self._failure
            if not self._live:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._take()

    def _take(self) -> EventsByIndex:
        batch: EventsByIndex = {}
        charged_bytes = 0
        left_entries = ENTRIES_AT_ONCE
        for _ in range(min(len(self._queue), EVENTS_AT_ONCE)):
            if left_entries <= 0:
                break
            event, n_bytes = self._queue.popleft()
            left_entries -= len(event.logprobs) + len(event.prompt_logprobs)
            charged_bytes += n_bytes
            batch.setdefault(self._first_choice[event.request_id] + event.index, []).append(event)
            if event.finish_reason is not None:
                self._finished(event.request_id)
        if charged_bytes:
            self._output.give_back(charged_bytes)
        return batch

    def _finished(self, request_id: str) -> None:
        """One of the request's sequences has ended. After the last, other requests have a place."""
        self._live[request_id] -= 1
        if not self._live[request_id]:
            del self._live[request_id]
            self._submissions.pop(request_id).end()
            self._later.extendleft(reversed(self._waiting.pop(request_id, ())))
            self._submit()

    def _submit(self) -> None:
        """Submit the next requests, as many as may run."""
        while self._later and len(self._submissions) < self._at_once:
            request = self._later.popleft()
            self._submissions[request.id] = self._engine.generate(request, self)

    def _end_submissions(self) -> None:
        self._later.clear()
        self._waiting.clear()
        for submission in self._submissions.values():
            submission.end()

    def _notify(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def sequence_error(event: OutputEvent) -> Exception | None:
    """The error for the client of a sequence that failed."""
    if event.finish_reason is FinishReason.ABORT:
        return EngineStopped("The server is stopping; the request was not completed.")
    if event.finish_reason is FinishReason.ERROR:
        message = event.error or "The request failed while it was computed."
        if event.param is not None:
            return refused_field(event.param, message, code="grammar_failed")
        return ApiError(500, message, type=SERVER, code="generation_failed")
    return None


@contextmanager
def generating(
    engine: Engine,
    requests: Sequence[Request],
    output: Reservation,
    record: RequestRecord,
    tracker: RequestTracker,
    after: Mapping[str, str] = NO_ORDER,
) -> Iterator[Inbox]:
    """Have the requests computed while the block runs, each that `after` names when another has
    ended. Gives their events, with choices numbered across all requests.

    The tracker follows them, and adds their tokens to the record.
    """
    if record.is_background:
        requests = [replace(request, is_background=True) for request in requests]
    inbox = Inbox(engine, requests, output, after)
    with tracker.answering(record, requests) as tracked, inbox.submitted(tracked.note):
        yield inbox
