"""What the dashboard shows of the engines: one task asks them all, for all that watch."""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from anyio import Event, Lock, current_time, move_on_after, sleep
from anyio.abc import TaskGroup

from engine.api import EngineStopped
from engine.values.stats import EngineStats, RequestInfo
from server.cache_feed import CacheFeed
from server.models.registry import ModelRegistry

INTERVAL_SECONDS = 1.0
"""Between two questions to an engine, however many watch."""

LINGER_SECONDS = 3.0
"""How long engines are asked after the last watcher has left: clients that poll come again."""

log = logging.getLogger("rootstock.watch")


@dataclass(frozen=True, slots=True)
class Poll:
    """The answers of all loaded engines. Polls are numbered from 1 on."""

    number: int
    asked_seconds: float  # of the event loop's clock
    stats: Mapping[str, EngineStats]  # by model
    requests: Sequence[RequestInfo] | EngineStopped  # see `ModelRegistry.requests`


class Watch:
    """Asks every engine once a second for its statistics, its requests and the changes of its
    cache, as long as anybody watches.
    """

    def __init__(self, models: ModelRegistry, tasks: TaskGroup) -> None:
        """The asking runs in `tasks`."""
        self._models = models
        self._tasks = tasks
        self._watched: list[CacheFeed | None] = []  # for each watcher, the cache that it watches
        self._left_seconds = 0.0  # when the last watcher left
        self._is_running = False
        self._lock = Lock()
        self._last: Poll | None = None
        self._change = Event()

    @asynccontextmanager
    async def watching(self, feed: CacheFeed | None = None) -> AsyncIterator[None]:
        """Have the engines asked while the block runs, also that of `feed` when it has stopped."""
        self._watched.append(feed)
        try:
            if not self._is_running:
                self._is_running = True
                self._tasks.start_soon(self._run)
            yield
        finally:
            self._watched.remove(feed)
            self._left_seconds = current_time()

    async def fresh(self) -> Poll:
        """The answers as of now. For use in `watching`, as is `next_after`."""
        asked_seconds = current_time()
        async with self._lock:
            if self._last is None or self._last.asked_seconds < asked_seconds:
                self._last = await self._poll()
                change, self._change = self._change, Event()
                change.set()
            return self._last

    async def next_after(self, number: int) -> Poll:
        """The latest answers, once there are others than those of the poll with that number."""
        while self._last is None or self._last.number == number:
            await self._change.wait()
        return self._last

    async def _run(self) -> None:
        feeds = set[CacheFeed]()
        try:
            while self._watched or current_time() < self._left_seconds + LINGER_SECONDS:
                feeds |= self._feeds()
                try:
                    await self.fresh()
                except Exception:
                    log.exception("the engines have not been asked")
                if self._models.closed.is_set():
                    await sleep(INTERVAL_SECONDS)
                with move_on_after(INTERVAL_SECONDS):
                    await self._models.closed.wait()
        finally:
            self._is_running, self._last = False, None
            for feed in feeds:
                feed.forget()

    def _feeds(self) -> set[CacheFeed]:
        loaded = {each.feed for each in self._models.all_loaded().values()}
        return loaded.union(feed for feed in self._watched if feed is not None)

    async def _poll(self) -> Poll:
        number = 1 if self._last is None else self._last.number + 1
        asked_seconds = current_time()
        feeds = asyncio.gather(*(feed.poll() for feed in self._feeds()))
        stats, requests, _ = await asyncio.gather(self._models.stats(), self._requests(), feeds)
        return Poll(number, asked_seconds, stats, requests)

    async def _requests(self) -> Sequence[RequestInfo] | EngineStopped:
        try:
            return await self._models.requests()
        except EngineStopped as error:
            return error
