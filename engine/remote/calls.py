"""What the server calls in an engine's process."""

import asyncio
import faulthandler
import logging
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from inspect import iscoroutinefunction
from types import GenericAlias
from typing import Any, get_type_hints

from pydantic import TypeAdapter

from engine.api import CacheWatch
from engine.core.thread import EngineThread
from engine.values.model import ModelCard
from engine.values.picture import CachePicture, NodeTokens
from engine.values.request import Request
from engine.values.settings import LOG_FORMAT, EngineConfig
from engine.values.stats import CacheTier, Cleared, EngineStats, Probed, RequestInfo

HANGS_SECONDS = 3.0
"""How long a drain may take after the time for requests and for the disk. The server waits for
five.
"""

STDERR = 2  # the descriptor: Python's own stream may be in the midst of a line


class EngineCalls:
    """Every coroutine is a call. Its name and the JSON of its arguments and of its result are what
    crosses the socket: see CALLS.
    """

    def __init__(self, start: Callable[[EngineConfig], EngineThread]) -> None:
        self._start = start
        self._engine: EngineThread  # since `load`
        self._watch: CacheWatch  # since `open_watch`
        self._watching = AsyncExitStack()
        self._looking = asyncio.Lock()  # a watch is for one task; a caller may leave in mid-call
        self._disk_seconds = 0.0  # that writing the disk cache may take at the end
        self.is_alive: Callable[[], bool] = lambda: True  # until there is an engine

    async def load(self, config: EngineConfig, log_level: int) -> ModelCard:
        """The first call. Lines on how loading goes are sent meanwhile."""
        logging.basicConfig(level=log_level, format=LOG_FORMAT)
        self._disk_seconds = config.disk.shutdown_seconds if config.disk else 0.0
        self._engine = await asyncio.to_thread(self._start, config)
        self.is_alive = self._engine.is_alive
        return self._engine.card

    async def submit(self, request: Request) -> None:
        """Returns when the engine has taken the request, whose events come by themselves."""
        await self._engine.submit(request)

    async def abort(self, request_id: str) -> None:
        self._engine.abort(request_id)

    async def check(self, request: Request) -> None:
        await self._engine.check(request)

    async def stats(self) -> EngineStats:
        return self._engine.stats()

    async def clear_cache(self, namespace_id: str | None, tiers: frozenset[CacheTier]) -> Cleared:
        return await self._engine.clear_cache(namespace_id, tiers)

    async def probe(self, prompt: tuple[int, ...], cache_salt: str, adapter: str) -> Probed:
        return await self._engine.probe(prompt, cache_salt, adapter)

    async def requests(self) -> tuple[RequestInfo, ...]:
        return await self._engine.requests()

    async def open_watch(self) -> None:
        """There is one watch at a time."""
        self._watch = await self._watching.enter_async_context(self._engine.watch())

    async def look(self) -> int:
        async with self._looking:
            return await self._watch.look()

    async def picture(self) -> CachePicture:
        async with self._looking:
            return await self._watch.picture()

    async def node(self, node_id: int, most_tokens: int) -> NodeTokens | None:
        async with self._looking:
            return await self._watch.node(node_id, most_tokens)

    async def close_watch(self) -> None:
        await self._watching.aclose()

    async def drain(self, timeout_seconds: float) -> EngineStats:
        """The last call. Returns the engine's last statistics.

        If something hangs, the stacks of all threads are logged before the server gives up.
        """
        faulthandler.dump_traceback_later(
            timeout_seconds + self._disk_seconds + HANGS_SECONDS, file=STDERR
        )
        try:
            await self._engine.drain(timeout_seconds)
        finally:
            faulthandler.cancel_dump_traceback_later()
        return self._engine.stats()


@dataclass(frozen=True, slots=True)
class CallTypes:
    """How the arguments and the result of a call are written in JSON, and read."""

    arguments: TypeAdapter[tuple[Any, ...]]
    result: TypeAdapter[Any]


def _types(call: Callable[..., object]) -> CallTypes:
    hints = get_type_hints(call)
    result = hints.pop("return")
    arguments: Any = GenericAlias(tuple, tuple(hints.values()))
    return CallTypes(TypeAdapter(arguments), TypeAdapter(result))


CALLS: Mapping[str, CallTypes] = {
    name: _types(call) for name, call in vars(EngineCalls).items() if iscoroutinefunction(call)
}
