"""The cache of one engine as JSON, made once for all that watch it."""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import thread_time

from anyio import Event, Lock, current_time, sleep_until, to_thread

from engine.api import Engine, EngineStopped
from engine.values.tree import NodeTokens, TreeChanges, TreeSnapshot
from server.http.sse import sse_data
from server.schemas.cache_tree import CacheTree

MIN_INTERVAL_SECONDS, MAX_INTERVAL_SECONDS = 0.25, 5.0
"""The shortest and the longest time between two questions to the engine, as its snapshots' cost
asks for. One that took long by chance, as when Python looked for garbage, delays the next no more.
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
        """As a server-sent event."""
        return sse_data(self.body)


class CacheFeed:
    """Follows the cache of an engine by what has changed since the last time. `server.watch.Watch`
    polls it while anybody watches.
    """

    def __init__(self, engine: Engine, model: str) -> None:
        self._engine = engine
        self._model = model
        self._snapshot: TreeSnapshot | None = None
        self._frame: Frame | None = None  # of that snapshot, once somebody wants it
        self._asked_seconds = -math.inf  # when the snapshot was requested
        self._due_seconds = 0.0  # when the engine may be asked again
        self._failure: Callable[[], Exception] | None = None
        self._lock = Lock()
        self._change = Event()

    async def poll(self) -> None:
        """Ask the engine, unless it is being asked or has just been asked. Its error is raised to
        those that wait for a frame.
        """
        if self._lock.locked() or (current_time() < self._due_seconds and self._engine.is_alive()):
            return
        async with self._lock:
            try:
                await self._ask()
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
        asked_seconds = current_time()
        async with self._lock:
            while self._asked_seconds < asked_seconds:
                await sleep_until(self._due_seconds)
                try:
                    await self._ask()
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

    async def node(self, node_id: int, most_tokens: int) -> NodeTokens | None:
        """See `engine.api.Engine.node`."""
        return await self._engine.node(node_id, most_tokens)

    def forget(self) -> None:
        """Free the memory: nobody watches any more."""
        self._snapshot = self._frame = self._failure = None
        self._asked_seconds = -math.inf

    async def _ask(self) -> None:
        before, asked_seconds = self._snapshot, current_time()
        answer = await self._engine.tree(0 if before is None else before.version)
        if isinstance(answer, TreeChanges):
            assert before is not None, "changes since nothing"
            answer = answer.applied_to(before)
        self._snapshot, self._frame, self._failure = answer, None, None
        self._asked_seconds = asked_seconds
        self._allow_again_after(answer.cost_seconds)
        self._notify()

    async def _rendered(self) -> Frame:
        """The last snapshot as a frame, which is made once."""
        assert self._snapshot is not None, "the engine has not been asked"
        if self._frame is not None:
            return self._frame
        snapshot = self._snapshot
        frame, cost_seconds = await to_thread.run_sync(_frame, snapshot, self._model)
        self._frame = frame
        self._allow_again_after(snapshot.cost_seconds + cost_seconds)
        return frame

    def _allow_again_after(self, cost_seconds: float) -> None:
        interval_seconds = max(MIN_INTERVAL_SECONDS, cost_seconds / SHARE)
        self._due_seconds = self._asked_seconds + min(interval_seconds, MAX_INTERVAL_SECONDS)

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
