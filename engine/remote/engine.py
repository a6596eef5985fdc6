"""The Engine of a model that is served in a process of its own."""

import asyncio
import logging
import socket
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterable, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from typing import TypeAlias

from engine.api import CacheWatch, EngineError, EngineStopped, InvalidRequest, Report
from engine.process.child import ChildProcess
from engine.remote.calls import EngineCalls
from engine.remote.connection import Call, Connection, R
from engine.remote.request_counters import RequestCounters
from engine.values.model import ModelCard, Tokenizer
from engine.values.output import FinishReason, OutputEvent, Usage
from engine.values.picture import CachePicture, NodeTokens
from engine.values.request import Request
from engine.values.settings import EngineConfig
from engine.values.stats import ALL_TIERS, CacheTier, Cleared, EngineStats, Probed, RequestInfo

ANSWER_SECONDS = 1.0
"""How long `stats` and `requests` wait for a process, which may have been stopped from outside."""

StartProcess: TypeAlias = Callable[[], tuple[socket.socket, ChildProcess]]
"""Starts a process that serves one engine. Returns the socket to it, too. Raises OSError."""

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
        """Queue the events of a request while the block runs. Raises InvalidRequest when the id has
        been taken.
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
        batches: defaultdict[asyncio.AbstractEventLoop, Batch] = defaultdict(list)
        for event in events:
            loop, queue = self._queues.get(event.request_id, (None, None))
            if loop is not None and queue is not None:
                batches[loop].append((queue, event))
        for loop, batch in batches.items():
            _hand_over(loop, batch)

    def end(self) -> None:
        """No more events will come: wake all that wait for some."""
        for loop, queue in tuple(self._queues.values()):
            _hand_over(loop, [(queue, None)])


def _hand_over(loop: asyncio.AbstractEventLoop, batch: Batch) -> None:
    try:
        loop.call_soon_threadsafe(_put_all, batch)
    except RuntimeError:  # the event loop has been closed: nobody waits any more
        logger.debug("dropped %d events of a closed event loop", len(batch))


def _put_all(batch: Batch) -> None:
    for queue, event in batch:
        queue.put_nowait(event)


def _open_tokenizer(card: ModelCard) -> Tokenizer:
    from engine.text.tokenizer import open_tokenizer  # noqa: PLC0415 - transformers takes a second

    return open_tokenizer(card)


class RemoteEngine:
    """Implements `engine.api.Engine`. Make it with `start`."""

    def __init__(
        self,
        connection: Connection,
        subscribers: Subscribers,
        card: ModelCard,
        tokenizer: Tokenizer,
        stats: EngineStats,
    ) -> None:
        """`stats` are shown until there are later ones."""
        self._connection = connection
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
        try:
            log_level = logging.getLogger().getEffectiveLevel()
            card = await connection.call(EngineCalls.load, config, log_level)
            stats = await connection.call(EngineCalls.stats)
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
            number, taken = self._connection.send(EngineCalls.submit, request)
            try:
                await asyncio.wrap_future(taken)
                while tracked.live:
                    event = await queue.get()
                    for one in [event] if event else _failures(request, tracked.live):
                        tracked.note(one)
                        yield one
            finally:
                if tracked.live and not _is_refused(taken):
                    self._connection.cancel(number)  # the engine may have taken it already
                    with suppress(EngineStopped):
                        self._connection.send(EngineCalls.abort, request.id)

    async def check(self, request: Request) -> None:
        await self._connection.call(EngineCalls.check, request)

    async def stats(self) -> EngineStats:
        with suppress(EngineStopped, TimeoutError):
            self._last_stats = await self._call_soon(EngineCalls.stats)
        return replace(self._last_stats, sequences=self._counters.counts())

    async def clear_cache(
        self, namespace_id: str | None = None, tiers: Collection[CacheTier] = ALL_TIERS
    ) -> Cleared:
        return await self._connection.call(EngineCalls.clear_cache, namespace_id, frozenset(tiers))

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[CacheWatch]:
        await self._connection.call(EngineCalls.open_watch)
        try:
            yield RemoteWatch(self._connection)
        finally:
            with suppress(EngineStopped):
                await asyncio.shield(self._connection.call(EngineCalls.close_watch))

    async def probe(self, prompt: tuple[int, ...], cache_salt: str, adapter: str) -> Probed:
        return await self._connection.call(EngineCalls.probe, prompt, cache_salt, adapter)

    async def requests(self) -> tuple[RequestInfo, ...]:
        with suppress(TimeoutError):
            self._last_requests = await self._call_soon(EngineCalls.requests)
        return self._last_requests

    def is_alive(self) -> bool:
        return self._connection.is_alive()

    async def ended(self) -> str:
        return await self._connection.ended()

    async def drain(self, timeout_seconds: float) -> None:
        with suppress(EngineStopped):  # then there is nothing to wait for
            self._last_stats = await self._connection.call(EngineCalls.drain, timeout_seconds)
        await asyncio.to_thread(self._connection.close)

    async def _call_soon(self, call: Call[R]) -> R:
        """The result of a call that answers within ANSWER_SECONDS. Raises TimeoutError after that,
        and EngineStopped.
        """
        number, answer = self._connection.send(call)
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return await asyncio.wrap_future(answer)
        finally:
            self._connection.cancel(number)


class RemoteWatch:
    """Implements `engine.api.CacheWatch`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def look(self) -> int:
        return await self._connection.call(EngineCalls.look)

    async def picture(self) -> CachePicture:
        return await self._connection.call(EngineCalls.picture)

    async def node(self, node_id: int, most_tokens: int) -> NodeTokens | None:
        return await self._connection.call(EngineCalls.node, node_id, most_tokens)


def _is_refused(taken: Future[None]) -> bool:
    """Whether the engine has refused the request, so that there is nothing to end. Another error is
    one of the connection: the engine may have taken the request.
    """
    return taken.done() and isinstance(taken.exception(), EngineError)


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
