"""The engine's events of one HTTP request.

Leaving `generating`, in whatever way, closes the engine's iterators and so aborts what still runs.
"""

from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial

from anyio import CapacityLimiter, Event
from anyio.lowlevel import checkpoint

from engine.api import Engine, EngineStopped
from engine.values.output import FinishReason, OutputEvent
from engine.values.request import Request
from server.activity.tracker import RequestTracker, TrackedRequest
from server.errors import SERVER, ApiError, refused_field
from server.http.unsent import Unsent, queued_bytes
from server.http.waiting import task_scope
from server.record import RequestRecord

ChoiceEvent = tuple[int, OutputEvent]
"""A choice's index in the response, and its event."""

EVENTS_AT_ONCE = 256
"""A few milliseconds of rendering: so long a slow client, when it reads, delays the others."""


REQUESTS_AT_ONCE = 128
"""Of one HTTP request's. The others are not queued yet: many texts would fill the queue."""


class MergedEvents:
    """The merged events of several engine requests, in batches. Raises what any of them raised.

    A slow client never holds the engine up: its events wait here, and count as unsent.
    """

    def __init__(self, n_sources: int, unsent: Unsent) -> None:
        self._n_sources = n_sources
        self._unsent = unsent
        self._queue: deque[tuple[ChoiceEvent, int]] = deque()  # with the bytes that each holds
        self._failure: Exception | None = None
        self._arrival = Event()
        self._is_woken = False

    def put(self, choice: int, event: OutputEvent) -> None:
        """Raises ApiError when too much is unsent, and the failure if there has been one."""
        if self._failure is not None:
            raise self._failure
        n_bytes = queued_bytes(event)
        self._unsent.add(n_bytes)
        self._queue.append(((choice, event), n_bytes))
        self._arrival.set()

    def fail(self, error: Exception) -> None:
        """Raise the error after the events that wait. The first error counts."""
        self._failure = self._failure or error
        self._arrival.set()

    def overrun(self, error: ApiError) -> None:
        """Raise the error in place of the events that wait."""
        self._queue.clear()
        self.fail(error)

    def source_ended(self) -> None:
        self._n_sources -= 1
        self._arrival.set()

    def wake(self) -> None:
        """Give the reader that waits a batch without events."""
        self._is_woken = True
        self._arrival.set()

    def __aiter__(self) -> "MergedEvents":
        return self

    async def __anext__(self) -> list[ChoiceEvent]:
        self._is_woken = False
        await self._some()
        return [self._take() for _ in range(min(len(self._queue), EVENTS_AT_ONCE))]

    async def _some(self) -> None:
        if self._queue:
            await checkpoint()  # a reader that never waits lets other tasks run
        while not self._queue:
            if self._failure is not None:
                raise self._failure
            if self._n_sources == 0:
                raise StopAsyncIteration
            if self._is_woken:
                return
            self._arrival = Event()
            await self._arrival.wait()

    def _take(self) -> ChoiceEvent:
        item, n_bytes = self._queue.popleft()
        self._unsent.give_back(n_bytes)
        return item


@asynccontextmanager
async def generating(
    engine: Engine,
    requests: Sequence[Request],
    unsent: Unsent,
    record: RequestRecord,
    tracker: RequestTracker,
) -> AsyncIterator[MergedEvents]:
    """Submit the requests. Gives their events, with choices numbered across all requests.

    The tracker follows them, and adds their tokens to the record.
    """
    events = MergedEvents(len(requests), unsent)
    places = CapacityLimiter(REQUESTS_AT_ONCE)
    with (
        tracker.answering(record, requests, events.overrun) as tracked,
        unsent.ended_by(events.overrun),
    ):
        async with task_scope() as tasks:
            for index, request in enumerate(requests):
                pump = partial(_pump, engine, request, index * request.n, events, tracked)
                tasks.start_soon(_in_turn, places, pump)
            yield events


async def _in_turn(places: CapacityLimiter, pump: Callable[[], Awaitable[None]]) -> None:
    async with places:
        await pump()


async def _pump(
    engine: Engine,
    request: Request,
    first_choice: int,
    sink: MergedEvents,
    tracked: TrackedRequest,
) -> None:
    try:
        async with aclosing(engine.generate(request)) as events:
            async for event in events:
                _raise_failure(event)
                tracked.note(event)
                sink.put(first_choice + event.index, event)
    except Exception as error:
        sink.fail(error)
    finally:
        sink.source_ended()


def _raise_failure(event: OutputEvent) -> None:
    if event.finish_reason is FinishReason.ABORT:
        raise EngineStopped("The server is stopping; the request was not completed.")
    if event.finish_reason is FinishReason.ERROR:
        message = event.error or "The request failed while it was computed."
        if event.param is not None:
            raise refused_field(event.param, message, code="grammar_failed")
        raise ApiError(500, message, type=SERVER, code="generation_failed")
