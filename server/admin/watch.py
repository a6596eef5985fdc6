"""The data of the dashboard: one task polls all engines for all watchers."""

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from time import thread_time
from typing import Annotated, cast
from weakref import WeakKeyDictionary

from anyio import Event, Lock, current_time, move_on_after, sleep, sleep_until, to_thread
from anyio.abc import TaskGroup
from fastapi import Depends, Request
from starlette.responses import Response

from engine.api import Engine, EngineStopped
from engine.values.stats import EngineStats, RequestInfo
from engine.values.tree import TreeChanges, TreeSnapshot
from server.admin_schema import CacheTree
from server.http.stream import EVENT_STREAM, DeferredStream, sse_data, written
from server.models.model import LoadedModel
from server.models.registry import ModelRegistry
from server.service import RequestContext

INTERVAL_SECONDS = 1.0
"""Between two polls of an engine, however many watch."""

LINGER_SECONDS = 3.0
"""How long engines are polled after the last watcher has left: clients that poll come again."""

MIN_CACHE_SECONDS, MAX_CACHE_SECONDS = 0.25, 5.0
"""The shortest and the longest time between two polls of a cache, as the cost of its snapshots
requires. One that took long by chance, as during a garbage collection, delays the next no more.
"""

SHARE = 0.02
"""The share of a processor that snapshots may take: large ones are made less often."""

log = logging.getLogger("rootstock.watch")


@dataclass(frozen=True, slots=True)
class Frame:
    """A snapshot as JSON."""

    version: int
    body: bytes

    @property
    def event(self) -> bytes:
        """The frame as a server-sent event."""
        return sse_data(self.body)


class CacheFeed:
    """Follows the cache of an engine by what has changed since the last time, and renders it as
    JSON once for all watchers. `Watch` polls it while anybody watches.
    """

    def __init__(self, engine: Engine, model: str) -> None:
        self._engine = engine
        self._model = model
        self._snapshot: TreeSnapshot | None = None
        self._frame: Frame | None = None  # of that snapshot, made on demand
        self._requested_seconds = -math.inf  # when the snapshot was requested
        self._due_seconds = 0.0  # when the engine may be polled again
        self._failure: Callable[[], Exception] | None = None
        self._lock = Lock()
        self._change = Event()

    async def poll(self) -> None:
        """Request a snapshot of the engine, unless a request is under way or too recent. An error
        is raised to the watchers that wait for a frame.
        """
        if self._lock.locked() or (current_time() < self._due_seconds and self._engine.is_alive()):
            return
        async with self._lock:
            try:
                await self._update()
            except TimeoutError:
                log.debug("%s does not answer soon", self._model)
            except EngineStopped as error:
                self._fail(partial(EngineStopped, str(error)))
            except Exception:
                log.exception("the cache of %s cannot be watched", self._model)
                self._fail(partial(RuntimeError, "the cache cannot be watched"))

    async def fresh(self) -> Frame:
        """The cache as of now. If the engine does not answer soon, as it was last seen. Raises what
        the engine raises.
        """
        requested_seconds = current_time()
        async with self._lock:
            while self._requested_seconds < requested_seconds:
                await sleep_until(self._due_seconds)
                try:
                    await self._update()
                except TimeoutError:
                    if self._snapshot is not None:
                        break
            return await self._rendered()

    async def next_after(self, version: int) -> Frame:
        """The latest frame, as soon as it has another version. Only while the feed is polled.
        Raises what the engine raises.
        """
        while self._failure is None and (
            self._snapshot is None or self._snapshot.version == version
        ):
            await self._change.wait()
        if self._failure is not None:
            raise self._failure()  # a new one for each: they grow when they are raised
        async with self._lock:
            return await self._rendered()

    def forget(self) -> None:
        """Free the memory of the last frame. Called when the last watcher has left."""
        self._snapshot = self._frame = self._failure = None
        self._requested_seconds = -math.inf

    async def _update(self) -> None:
        before, requested_seconds = self._snapshot, current_time()
        answer = await self._engine.tree(0 if before is None else before.version)
        if isinstance(answer, TreeChanges):
            assert before is not None, "changes since nothing"
            answer = answer.applied_to(before)
        self._snapshot, self._frame, self._failure = answer, None, None
        self._requested_seconds = requested_seconds
        self._allow_again_after(answer.cost_seconds)
        self._notify()

    async def _rendered(self) -> Frame:
        """The last snapshot as a frame, which is made once."""
        assert self._snapshot is not None, "no snapshot was requested"
        if self._frame is not None:
            return self._frame
        snapshot = self._snapshot
        frame, cost_seconds = await to_thread.run_sync(_frame, snapshot, self._model)
        self._frame = frame
        self._allow_again_after(snapshot.cost_seconds + cost_seconds)
        return frame

    def _allow_again_after(self, cost_seconds: float) -> None:
        interval_seconds = max(MIN_CACHE_SECONDS, cost_seconds / SHARE)
        self._due_seconds = self._requested_seconds + min(interval_seconds, MAX_CACHE_SECONDS)

    def _fail(self, failure: Callable[[], Exception]) -> None:
        self._failure = failure
        self._notify()

    def _notify(self) -> None:
        change, self._change = self._change, Event()
        change.set()


def _frame(snapshot: TreeSnapshot, model: str) -> tuple[Frame, float]:
    """A snapshot as JSON, and the seconds of processor time that it took."""
    began_seconds = thread_time()
    body = CacheTree.of(snapshot, model).model_dump_json().encode()
    return Frame(snapshot.version, body), thread_time() - began_seconds


@dataclass(frozen=True, slots=True)
class Poll:
    """The answers of all loaded engines. Polls are numbered from 1 on."""

    number: int
    requested_seconds: float  # of the event loop's clock
    stats: Mapping[str, EngineStats]  # by model
    requests: Sequence[RequestInfo] | EngineStopped  # see `ModelRegistry.requests`


class Watch:
    """Polls every engine once a second for its statistics, its requests and the changes of its
    cache, as long as anybody watches.
    """

    def __init__(self, models: ModelRegistry, tasks: TaskGroup) -> None:
        """Polls run in `tasks`."""
        self._models = models
        self._tasks = tasks
        self._feeds = WeakKeyDictionary[LoadedModel, CacheFeed]()
        self._watched: list[LoadedModel | None] = []  # for each watcher, whose cache it watches
        self._left_seconds = 0.0  # when the last watcher left
        self._is_running = False
        self._lock = Lock()
        self._last: Poll | None = None
        self._change = Event()

    @asynccontextmanager
    async def watching(self, loaded: LoadedModel | None = None) -> AsyncIterator[None]:
        """Poll the engines while the block runs, also that of `loaded` when it has stopped."""
        self._watched.append(loaded)
        try:
            if not self._is_running:
                self._is_running = True
                self._tasks.start_soon(self._run)
            yield
        finally:
            self._watched.remove(loaded)
            self._left_seconds = current_time()

    def feed(self, loaded: LoadedModel) -> CacheFeed:
        """The cache of a model, for all its watchers. Use it within `watching`."""
        if loaded not in self._feeds:
            self._feeds[loaded] = CacheFeed(loaded.engine, loaded.model.name)
        return self._feeds[loaded]

    async def fresh(self) -> Poll:
        """The answers as of now. For use within `watching`, as is `next_after`."""
        requested_seconds = current_time()
        async with self._lock:
            if self._last is None or self._last.requested_seconds < requested_seconds:
                self._last = await self._poll()
                change, self._change = self._change, Event()
                change.set()
            return self._last

    async def next_after(self, number: int) -> Poll:
        """The latest answers, once there are newer ones than those of poll number `number`."""
        while self._last is None or self._last.number == number:
            await self._change.wait()
        return self._last

    def _may_come_again(self) -> bool:
        """Whether clients that poll may come again: not while the daemon stops."""
        is_recent = current_time() < self._left_seconds + LINGER_SECONDS
        return is_recent and not self._models.closed.is_set()

    async def _run(self) -> None:
        feeds = set[CacheFeed]()
        try:
            while self._watched or self._may_come_again():
                feeds |= self._polled()
                try:
                    await self.fresh()
                except Exception:
                    log.exception("the engines could not be polled")
                if self._models.closed.is_set():
                    await sleep(INTERVAL_SECONDS)
                with move_on_after(INTERVAL_SECONDS):
                    await self._models.closed.wait()
        finally:
            self._is_running, self._last = False, None
            for feed in feeds:
                feed.forget()

    def _polled(self) -> set[CacheFeed]:
        loaded = {*self._models.all_loaded().values(), *self._watched}
        return {self.feed(each) for each in loaded if each is not None}

    async def _poll(self) -> Poll:
        number = 1 if self._last is None else self._last.number + 1
        requested_seconds = current_time()
        feeds = asyncio.gather(*(feed.poll() for feed in self._polled()))
        stats, requests, _ = await asyncio.gather(self._models.stats(), self._requests(), feeds)
        return Poll(number, requested_seconds, stats, requests)

    async def _requests(self) -> Sequence[RequestInfo] | EngineStopped:
        try:
            return await self._models.requests()
        except EngineStopped as error:
            return error


async def _watch(request: Request) -> Watch:
    return cast(Watch, request.app.state.watch)


WatchDependency = Annotated[Watch, Depends(_watch)]


class EventStream(Response):
    """Server-sent events, as FastAPI describes the routes that have `event_stream`."""

    media_type = EVENT_STREAM


async def event_stream(
    events: AsyncGenerator[bytes, None], context: RequestContext
) -> DeferredStream:
    """An endless stream of events, with comments after each silence. It ends when its client
    disconnects.

    Raises ApiError (408, 413) for a request that declares a body and does not send it.
    """
    await context.http.body()  # once it has begun, a stream could not say what is wrong with it
    context.record.never_ends()
    keepalive_seconds = context.service.settings.keepalive_seconds
    return DeferredStream(EVENT_STREAM, written(events), keepalive_seconds)
