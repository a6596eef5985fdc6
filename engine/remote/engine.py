"""The Engine of a model that is served in a process of its own."""

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import replace
from typing import Any, TypeAlias

from engine.api import CacheWatch, EngineError, EngineStopped
from engine.child_process import ChildProcess
from engine.remote import calls
from engine.remote.connection import Connection, Receivers
from engine.remote.request_counters import RequestCounters
from engine.remote.subscribers import Subscribers, last_events
from engine.values.model import ModelCard, Tokenizer
from engine.values.output import OutputEvent
from engine.values.picture import CachePicture, NodeTokens
from engine.values.request import Request
from engine.values.settings import EngineConfig
from engine.values.stats import (
    ALL_TIERS,
    CacheTier,
    Cleared,
    EngineStats,
    Probed,
    RequestInfo,
)

ANSWER_SECONDS = 1.0
"""For a process to say how things stand: one that has been stopped from outside holds up nobody who
only looks.
"""

StartProcess: TypeAlias = Callable[[], tuple[socket.socket, ChildProcess]]
"""A process that serves one engine, and the socket to it. Raises OSError."""


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
        report: Callable[[str], None],
        open_tokenizer: Callable[[ModelCard], Tokenizer] = _open_tokenizer,
    ) -> "RemoteEngine":
        """Returns when the process has loaded the model, and raises what that raises. Cancelled, it
        ends the process.
        """
        subscribers = Subscribers()
        receivers = Receivers(subscribers.deliver, report, subscribers.end)
        connection = Connection(*await asyncio.to_thread(start_process), receivers)
        try:
            level = logging.getLogger().getEffectiveLevel()
            card: ModelCard = await connection.ask(calls.Load(config, level))
            stats: EngineStats = await connection.ask(calls.Stats())
            tokenizer = await asyncio.to_thread(open_tokenizer, card)
            return cls(connection, subscribers, card, tokenizer, stats)
        except BaseException:
            connection.kill()
            raise

    async def generate(self, request: Request) -> AsyncGenerator[OutputEvent, None]:
        with self._counters.track(request.n) as tracked:
            queue = self._subscribers.add(request.id)
            try:
                number, taken = self._connection.send(calls.Submit(request))
                try:
                    await asyncio.wrap_future(taken)
                    while tracked.live:
                        event = await queue.get()
                        for one in (event,) if event else last_events(request, tracked.live):
                            tracked.note(one)
                            yield one
                finally:
                    if tracked.live and not _is_refused(taken):
                        self._abort(number, request.id)
            finally:
                self._subscribers.remove(request.id)

    async def check(self, request: Request) -> None:
        await self._connection.ask(calls.Check(request))

    async def stats(self) -> EngineStats:
        with suppress(EngineStopped, TimeoutError):
            self._last_stats = await self._told(calls.Stats())
        return replace(self._last_stats, sequences=self._counters.counts())

    async def clear_cache(
        self, namespace_id: str | None = None, tiers: Collection[CacheTier] = ALL_TIERS
    ) -> Cleared:
        cleared: Cleared = await self._connection.ask(
            calls.ClearCache(namespace_id, frozenset(tiers))
        )
        return cleared

    def watch(self) -> AbstractAsyncContextManager[CacheWatch]:
        return self._watching()

    async def probe(self, prompt: tuple[int, ...], cache_salt: str, adapter: str) -> Probed:
        call = calls.Probe(prompt, cache_salt, adapter)
        probed: Probed = await self._connection.ask(call)
        return probed

    async def requests(self) -> tuple[RequestInfo, ...]:
        with suppress(TimeoutError):
            self._last_requests = await self._told(calls.ListRequests())
        return self._last_requests

    def is_alive(self) -> bool:
        return self._connection.is_alive()

    async def ended(self) -> str:
        return await self._connection.ended()

    async def drain(self, timeout_seconds: float) -> None:
        with suppress(EngineStopped):  # then there is nothing to wait for
            self._last_stats = await self._connection.ask(calls.Drain(timeout_seconds))
        await asyncio.to_thread(self._connection.close)

    @asynccontextmanager
    async def _watching(self) -> AsyncIterator[CacheWatch]:
        await self._connection.ask(calls.OpenWatch())
        try:
            yield RemoteWatch(self._connection.ask)
        finally:
            with suppress(EngineStopped):
                await asyncio.shield(
                    asyncio.ensure_future(self._connection.ask(calls.CloseWatch()))
                )

    async def _told(self, call: calls.Call) -> Any:
        """What the process says within ANSWER_SECONDS. Raises TimeoutError behind that, and
        EngineStopped.
        """
        number, answer = self._connection.send(call)
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return await asyncio.wrap_future(answer)
        finally:
            self._connection.cancel(number)

    def _abort(self, number: int, request_id: str) -> None:
        """End a request, whether or not the engine has taken it. Does nothing on a stopped one."""
        self._connection.cancel(number)
        with suppress(EngineStopped):
            self._connection.send(calls.Abort(request_id))


class RemoteWatch:
    """Implements `engine.api.CacheWatch`."""

    def __init__(self, ask: Callable[[calls.Call], Any]) -> None:
        self._ask = ask

    async def look(self) -> int:
        version: int = await self._ask(calls.Look())
        return version

    async def picture(self) -> CachePicture:
        picture: CachePicture = await self._ask(calls.Picture())
        return picture

    async def node(self, node_id: int, most_tokens: int) -> NodeTokens | None:
        node: NodeTokens | None = await self._ask(calls.Node(node_id, most_tokens))
        return node


def _is_refused(taken: Future[None]) -> bool:
    """Whether the engine has refused the request, so that there is nothing to end. Another error is
    one of the connection: the engine may have taken the request.
    """
    return taken.done() and isinstance(taken.exception(), EngineError)
