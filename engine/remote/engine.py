"""The engine as the server sees it: a client of the process that serves the model."""

import asyncio
import logging
import socket
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from threading import Lock
from typing import TypeAlias

from engine.api import (
    EngineError,
    EngineStopped,
    InvalidRequest,
    QueueFull,
    Report,
)
from engine.process.child import ChildProcess
from engine.remote.connection import Call, Connection, P, R
from engine.remote.host import Calls
from engine.values.model import ModelCard, Tokenizer
from engine.values.output import FinishReason, OutputEvent, Usage
from engine.values.request import RefusalReason, Request
from engine.values.settings import EngineConfig
from engine.values.stats import EngineStats, RequestInfo, SequenceCounts
from engine.values.tree import TreeChanges, TreeSnapshot

ANSWER_SECONDS = 1.0
"""How long `stats`, `requests` and `tree` wait for a process, which may have been stopped from
outside.
"""

_REASONS = {InvalidRequest: RefusalReason.INVALID, QueueFull: RefusalReason.QUEUE_FULL}

StartProcess: TypeAlias = Callable[[], tuple[socket.socket, ChildProcess]]
"""Starts a process that serves one engine. Returns it with the socket to it. Raises OSError."""

EventQueue: TypeAlias = "asyncio.Queue[OutputEvent | None]"
"""The events of one request; None when the engine has stopped."""

Batch: TypeAlias = list[tuple[EventQueue, OutputEvent | None]]

logger = logging.getLogger(__name__)


class Subscribers:
    """Delivers events to the requests' event loops, with one wake-up of each loop a step."""

    def __init__(self) -> None:
        self._queues: dict[str, tuple[asyncio.AbstractEventLoop, EventQueue]] = {}

    @contextmanager
    def queue(self, request_id: str) -> Iterator[EventQueue]:
        """Queue the events of a request while the block runs. Raises InvalidRequest if another
        request with the same id is being served.
        """
        if request_id in self._queues:
            raise InvalidRequest(f"a request with id {request_id} is being served", "id")
        queue: EventQueue = asyncio.Queue()
        self._queues[request_id] = asyncio.get_running_loop(), queue
        try:
            yield queue
        finally:
            del self._queues[request_id]

    def deliver(self, events: list[OutputEvent]) -> None:
        """Put the events into their requests' queues, from any thread."""
        batches: defaultdict[asyncio.AbstractEventLoop, Batch] = defaultdict(list)
        for event in events:
            loop, queue = self._queues.get(event.request_id, (None, None))
            if loop is not None and queue is not None:
                batches[loop].append((queue, event))
        for loop, batch in batches.items():
            _hand_over(loop, batch)

    def end(self) -> None:
        """No more events will come: end all queues with None."""
        for loop, queue in tuple(self._queues.values()):
            _hand_over(loop, [(queue, None)])


def _hand_over(loop: asyncio.AbstractEventLoop, batch: Batch) -> None:
    try:
        loop.call_soon_threadsafe(_put_all, batch)
    except RuntimeError:  # the event loop has been closed
        logger.debug("dropped %d events of a closed event loop", len(batch))


def _put_all(batch: Batch) -> None:
    for queue, event in batch:
        queue.put_nowait(event)


def _open_tokenizer(card: ModelCard) -> Tokenizer:
    from engine.text.tokenizer import open_tokenizer  # noqa: PLC0415 - transformers takes a second

    return open_tokenizer(card)


class TrackedRequest:
    """One request. `live` has the indices of its sequences that have not ended yet."""

    def __init__(self, counters: "RequestCounters", n: int) -> None:
        self._counters = counters
        self.live = set(range(n))

    def note(self, event: OutputEvent) -> None:
        """Count an event that the caller is about to get."""
        if event.finish_reason is not None:
            self.live.remove(event.index)
            self._counters.finished(event.finish_reason, 1)


class RequestCounters:
    """Counts sequences where callers get their events. So the sums are right however a request
    ends, including when the engine has never received it, or has died.

    Thread-safe, because callers may use several event loops.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._received = 0
        self._refused = dict.fromkeys(RefusalReason, 0)
        self._finished = dict.fromkeys(FinishReason, 0)

    @contextmanager
    def track(self, n: int) -> Iterator[TrackedRequest]:
        """Count a request of n sequences while the block runs. If the block raises an EngineError,
        the sequences that have not ended count as refused; after any other exception, as aborted.
        """
        tracked = TrackedRequest(self, n)
        with self._lock:
            self._received += len(tracked.live)
        try:
            yield tracked
        except EngineError as error:
            with self._lock:
                self._refused[_REASONS.get(type(error), RefusalReason.STOPPED)] += len(tracked.live)
            raise
        except BaseException:
            self.finished(FinishReason.ABORT, len(tracked.live))
            raise

    def finished(self, reason: FinishReason, n_sequences: int) -> None:
        """Count sequences that have ended."""
        with self._lock:
            self._finished[reason] += n_sequences

    def counts(self) -> SequenceCounts:
        """The counts as of now."""
        with self._lock:
            return SequenceCounts(self._received, self._refused.copy(), self._finished.copy())


class RemoteEngine(Calls):
    """Implements `engine.api.Engine`. Make it with `start`.

    A call that needs nothing more than its result is inherited from the table of calls.
    """

    def __init__(
        self,
        connection: Connection,
        subscribers: Subscribers,
        card: ModelCard,
        tokenizer: Tokenizer,
        stats: EngineStats,
    ) -> None:
        """`stats` are returned until there are later ones."""
        super().__init__(connection)
        self._subscribers = subscribers
        self.card = card
        self.tokenizer = tokenizer
        self._last_stats = stats
        self._last_requests: tuple[RequestInfo, ...] = ()
        self._counters = RequestCounters()

    @classmethod
    async def start(
        cls,
        start_process: StartProcess,
        config: EngineConfig,
        report: Report,
        open_tokenizer: Callable[[ModelCard], Tokenizer] = _open_tokenizer,
    ) -> "RemoteEngine":
        """Returns when the process has loaded the model. Raises what loading raises. The process is
        killed if this is cancelled.
        """
        subscribers = Subscribers()
        connected = await asyncio.to_thread(start_process)
        connection = Connection(*connected, subscribers.deliver, report, subscribers.end)
        calls = Calls(connection)
        try:
            card = await calls.load(config, logging.getLogger().getEffectiveLevel())
            stats = await calls.stats()
            tokenizer = await asyncio.to_thread(open_tokenizer, card)
            return cls(connection, subscribers, card, tokenizer, stats)
        except BaseException:
            connection.kill()
            raise

    async def generate(self, request: Request) -> AsyncGenerator[OutputEvent, None]:
        with (
            self._counters.track(request.n) as tracked,
            self._subscribers.queue(request.id) as queue,
        ):
            number, accepted = self.connection.send(Calls.submit, request)
            try:
                await asyncio.wrap_future(accepted)
                while tracked.live:
                    event = await queue.get()
                    for one in [event] if event else _failures(request, tracked.live):
                        tracked.note(one)
                        yield one
            finally:
                if tracked.live and not _is_refused(accepted):
                    self.connection.cancel(number)  # the engine may have accepted it already
                    with suppress(EngineStopped):
                        self.connection.send(Calls.abort, request.id)

    async def stats(self) -> EngineStats:
        with suppress(EngineStopped, TimeoutError):
            self._last_stats = await self._call_with_timeout(Calls.stats)
        return replace(self._last_stats, sequences=self._counters.counts())

    async def tree(self, since: int) -> TreeSnapshot | TreeChanges:
        return await self._call_with_timeout(Calls.tree, since)

    async def requests(self) -> tuple[RequestInfo, ...]:
        with suppress(TimeoutError):
            self._last_requests = await self._call_with_timeout(Calls.requests)
        return self._last_requests

    def is_alive(self) -> bool:
        return self.connection.is_alive()

    async def ended(self) -> str:
        return await self.connection.ended()

    async def drain(self, timeout_seconds: float) -> None:
        with suppress(EngineStopped):  # then there is nothing to wait for
            await super().drain(timeout_seconds)
            self._last_stats = await super().stats()
        await asyncio.to_thread(self.connection.close)

    async def _call_with_timeout(
        self, call: Call[P, R], *arguments: P.args, **named: P.kwargs
    ) -> R:
        """The result of a call. Raises TimeoutError after ANSWER_SECONDS, and EngineStopped."""
        number, result = self.connection.send(call, *arguments, **named)
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return await asyncio.wrap_future(result)
        finally:
            self.connection.cancel(number)


def _is_refused(accepted: Future[None]) -> bool:
    """Whether the engine has refused the request, so that nothing is to be aborted. After any other
    error the engine may have accepted it.
    """
    return accepted.done() and isinstance(accepted.exception(), EngineError)


def _failures(request: Request, live: Iterable[int]) -> list[OutputEvent]:
    """The last event of each sequence that a stopped engine has left unfinished."""
    return [
        OutputEvent(
            request_id=request.id,
            index=index,
            finish_reason=FinishReason.ERROR,
            usage=Usage(len(request.prompt), 0, 0),
            error="the engine has stopped",
        )
        for index in live
    ]
