"""Pictures of the cache for all that watch it: one task makes them, while anybody watches."""

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from time import thread_time

from anyio import Event, Lock, current_time, sleep_until, to_thread
from anyio.abc import TaskGroup

from engine.api import CacheWatch, Engine, EngineStopped
from engine.values.picture import CachePicture, NodeTokens
from server.schemas.cache_tree import CacheTree
from server.transport.sse import sse_data

INTERVAL_SECONDS = 0.25
SHARE = 0.02
"""The share of a processor that pictures may take: those of a large tree are made less often."""

LINGER_SECONDS = 3.0
"""How long the engine's watch goes on without watchers: clients that poll start it only once."""

log = logging.getLogger("rootstock.watch")


@dataclass(frozen=True, slots=True)
class Frame:
    """A picture as JSON, made at a time of the event loop's clock."""

    version: int
    made_seconds: float
    body: bytes

    @property
    def event(self) -> bytes:
        return sse_data(self.body)


class CacheFeed:
    """Shares pictures between all watchers. The engine's watch ends when the last one has left."""

    def __init__(self, engine: Engine, model: str, tasks: TaskGroup) -> None:
        self._engine = engine
        self._model = model
        self._tasks = tasks
        self._n_watchers = 0
        self._left_seconds = 0.0  # when the last of them left
        self._wanted_seconds = 0.0  # a picture that is older will not do
        self._interval_seconds = INTERVAL_SECONDS
        self._is_running = False
        self._failure: Callable[[], Exception] | None = None
        self._watch: CacheWatch | None = None
        self._using = Lock()  # the watch
        self._frame: Frame | None = None
        self._change = Event()

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Pictures are made for as long as the block runs."""
        self._n_watchers += 1
        try:
            if not self._is_running:
                self._is_running, self._failure = True, None
                self._tasks.start_soon(self._run)
            yield
        finally:
            self._n_watchers -= 1
            self._left_seconds = current_time()

    async def picture(self) -> Frame:
        """As of now: the next that is made. In `watching`; raises what the engine raises."""
        asked_seconds = self._wanted_seconds = current_time()
        while self._frame is None or self._frame.made_seconds < asked_seconds:
            await self._changed()
        return self._frame

    async def next_after(self, version: int) -> Frame:
        """The latest picture, once there is another than that. Likewise."""
        while self._frame is None or self._frame.version == version:
            await self._changed()
        return self._frame

    async def stopped(self) -> None:
        """Wait for the end of the engine, which is raised. Likewise."""
        while True:
            await self._changed()

    async def node(self, node_id: int, most_tokens: int) -> NodeTokens | None:
        """See CacheWatch. Likewise."""
        while True:
            async with self._using:
                if self._watch is not None:
                    return await self._watch.node(node_id, most_tokens)
            await self._changed()

    async def _changed(self) -> None:
        if self._failure is None:
            await self._change.wait()
        if self._failure is not None:
            raise self._failure()

    def _notify(self) -> None:
        change, self._change = self._change, Event()
        change.set()

    async def _run(self) -> None:
        try:
            while self._n_watchers:  # one may come while the watch is being ended
                await self._follow()
        except EngineStopped as error:
            self._failure = partial(
                EngineStopped, str(error)
            )  # one for each: they grow when raised
        except Exception:
            log.exception("the watch of the cache has failed")
            self._failure = partial(RuntimeError, "the watch of the cache has failed")
        finally:
            self._is_running = False
            self._notify()

    async def _follow(self) -> None:
        """Make pictures until there have been no watchers for LINGER_SECONDS."""
        try:
            async with self._engine.watch() as watch:
                self._watch = watch
                self._notify()
                while self._n_watchers or current_time() < self._left_seconds + LINGER_SECONDS:
                    began_seconds = current_time()
                    await self._look()
                    await sleep_until(began_seconds + self._interval_seconds)
                async with self._using:
                    self._watch = None  # a look at one that is being ended would begin it again
        finally:
            self._watch = self._frame = None

    async def _look(self) -> None:
        """Make another picture if the cache has changed, or one is wanted anyway."""
        assert self._watch is not None, "there is no watch"
        async with self._using:
            made_seconds = current_time()
            version = await self._watch.look()
            frame = self._frame
            is_wanted = frame is None or frame.made_seconds < self._wanted_seconds
            if self._n_watchers and (frame is None or frame.version != version or is_wanted):
                picture = await self._watch.picture()
                body, cost_seconds = await to_thread.run_sync(_body, picture, self._model)
                self._interval_seconds = max(INTERVAL_SECONDS, cost_seconds / SHARE)
                self._frame = Frame(version, made_seconds, body)
                self._notify()


def _body(picture: CachePicture, model: str) -> tuple[bytes, float]:
    """A picture as JSON, and the seconds of a processor that both took."""
    began_seconds = thread_time()
    body = CacheTree.of(picture, model).model_dump_json().encode()
    return body, picture.cost_seconds + thread_time() - began_seconds
