"""The engine's loop on a thread of its own: calls in, from one event loop, and events out."""

import asyncio
import logging
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TypeVar

from engine.api import CacheWatch, EngineStopped, NoGrammars
from engine.core.inbox import Inbox
from engine.core.loop import Deliver, EngineLoop
from engine.core.request import Limits, prepare, validate
from engine.core.statistics import snapshot
from engine.grammar.answers import Trials, Verdict
from engine.grammar.factory import (
    GuideMaker,
    Verdicts,
    all_refused,
    check_verdicts,
    is_dispensable,
    untried,
)
from engine.values.model import ModelCard
from engine.values.request import Grammar, Request
from engine.values.stats import (
    ALL_TIERS,
    CacheTier,
    Cleared,
    DecodeStats,
    EngineStats,
    MemoryStats,
    Probed,
    RequestInfo,
)
from engine.watch.picture import LiveWatch
from engine.watch.snapshot import find_namespace, request_infos
from kvstore.tokens import Tokens, block_digests

logger = logging.getLogger(__name__)

T = TypeVar("T")

QUICK_TOKENS = 4096
"""Tokens that are checked and packed in about the time in which a thread begins to run."""

STALL_SECONDS = 600.0
"""A step that takes longer than this counts as hung. The slowest honest one takes seconds."""


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What is made on the engine thread, because MLX arrays belong to the thread that made them."""

    loop: EngineLoop
    card: ModelCard
    limits: Limits
    guides: GuideMaker
    trials: Trials
    memory: Callable[[], MemoryStats]  # on any thread
    decode: Callable[[], DecodeStats]  # on any thread
    release_thread: Callable[[], None]  # called last of all on that thread


Build = Callable[[Inbox, Deliver], EngineParts]


class EngineThread:
    """A running engine. Its coroutines are for one event loop."""

    def __init__(self, build: Build, deliver: Deliver, ended: Callable[[], None]) -> None:
        """Start the thread. Returns when `build` has run on it, and raises what that raises.

        `deliver` and `ended` are called on the engine thread, `ended` last of all.
        """
        self._inbox = Inbox()
        self._draining = False
        self._ended = Future[None]()
        self._ended.set_running_or_notify_cancel()  # so that a waiter cannot cancel it
        self._versions = count(1)  # of pictures
        built = Future[EngineParts]()
        self._thread = threading.Thread(
            target=self._main, args=(build, deliver, ended, built), name="engine", daemon=True
        )
        self._thread.start()
        self._parts = built.result()
        self._loop, self.card = self._parts.loop, self._parts.card

    async def submit(self, request: Request) -> None:
        """Returns when the loop has taken it; its events may come before that.

        Raises InvalidRequest, QueueFull or EngineStopped.
        """
        if self._draining:
            raise EngineStopped("the daemon is shutting down and takes no new requests")
        scheduler, metrics = self._loop.scheduler, self._loop.metrics
        metrics.received += request.n
        arrived_seconds = metrics.now()
        new_guide = self._parts.guides.guides(request, await self._tried(request))
        pack = partial(prepare, request, self._parts.limits, new_guide, scheduler.block_hashes)
        is_quick = request.n * len(request.prompt) <= QUICK_TOKENS
        submission = pack() if is_quick else await asyncio.to_thread(pack)
        await self._ask(partial(scheduler.add, submission, arrived_seconds))

    def abort(self, request_id: str) -> None:
        """Within a step no block is held for it. Does nothing when it has ended."""
        self._tell(partial(self._loop.abort, request_id))

    async def check(self, request: Request) -> None:
        validate(request, self._parts.limits)
        await self._tried(request)

    async def _tried(self, request: Request) -> Verdicts:
        """Raises InvalidRequest for a grammar that cannot be served, NoGrammars where none can."""
        verdicts = dict[Grammar, Verdict]()
        try:
            while grammars := untried(request, verdicts):
                verdicts |= await self._parts.trials.of(request.client, grammars)
        except NoGrammars as error:
            if not is_dispensable(request):
                raise
            return all_refused(request, str(error))
        check_verdicts(request, verdicts)
        return verdicts

    def stats(self) -> EngineStats:
        """The statistics as of now, at once: also while a step runs, and when the loop is dead."""
        parts = self._parts
        return snapshot(self._loop.scheduler, self._loop.sizes, parts.memory(), parts.decode())

    async def clear_cache(
        self, namespace_id: str | None = None, tiers: Collection[CacheTier] = ALL_TIERS
    ) -> Cleared:
        loop, namespace = self._loop, None
        if namespace_id is not None:
            known = await self._ask(lambda: loop.namespaces)
            namespace = await asyncio.to_thread(find_namespace, namespace_id, known)
            if namespace is None:  # it may be new, or on disk alone
                return await self._ask(partial(loop.clear_named, namespace_id, known, tiers))
        return await self._ask(partial(loop.clear, namespace, tiers))

    def watch(self) -> AbstractAsyncContextManager[CacheWatch]:
        loop = self._loop
        return nullcontext(LiveWatch(self._ask, loop.scheduler, loop.sizes, self._versions))

    async def probe(self, prompt: tuple[int, ...], cache_salt: str, adapter: str) -> Probed:
        scheduler = self._loop.scheduler
        namespace, store = scheduler.namespaces.of(cache_salt, adapter), scheduler.store
        tokens = await asyncio.to_thread(Tokens, prompt)  # which may be many
        cached_tokens = await self._ask(partial(store.probe, namespace, tokens))
        cached = prompt[:cached_tokens]
        digests = await asyncio.to_thread(block_digests, namespace, cached, store.block_size)
        return Probed(cached_tokens, tuple(digest.hex() for digest in digests))

    async def requests(self) -> tuple[RequestInfo, ...]:
        return await self._ask(partial(request_infos, self._loop.scheduler))

    def is_alive(self) -> bool:
        started = self._loop.step_started_seconds
        stalled = started is not None and self._loop.metrics.now() - started > STALL_SECONDS
        return self._thread.is_alive() and not self._inbox.is_closed and not stalled

    async def drain(self, timeout_seconds: float) -> None:
        self._draining = True
        try:
            async with asyncio.timeout(timeout_seconds):
                idle = await self._ask(self._loop.when_idle)
                await asyncio.wrap_future(idle)
        except TimeoutError:
            logger.warning("aborting what is left after %g seconds", timeout_seconds)
        except EngineStopped:
            logger.warning("the engine had stopped before")
        self._tell(self._loop.abort_all)
        self._tell(self._loop.stop)
        await asyncio.wrap_future(self._ended)
        self._thread.join()

    async def _ask(self, function: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._inbox.post(function))

    def _tell(self, function: Callable[[], None]) -> None:
        """Post a call that ends something, without waiting. Does nothing on a stopped engine."""
        with suppress(EngineStopped):
            self._inbox.post(function, urgent=True).add_done_callback(_log_failure)

    def _main(
        self,
        build: Build,
        deliver: Deliver,
        ended: Callable[[], None],
        built: "Future[EngineParts]",
    ) -> None:
        """The engine thread, from loading the model to the last turn."""
        try:
            parts = build(self._inbox, deliver)
        except BaseException as error:
            self._inbox.close()
            built.set_exception(error)
            return
        built.set_result(parts)
        try:
            parts.loop.run()
        except Exception:
            logger.critical("the engine loop has died", exc_info=True)
        finally:
            self._inbox.close()
            ended()
            parts.release_thread()
            self._ended.set_result(None)


def _log_failure(future: "Future[None]") -> None:
    if not future.cancelled() and (error := future.exception()) is not None:
        logger.error("a call that nobody waits for has failed", exc_info=error)
