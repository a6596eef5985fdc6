"""Runs the engine's loop on a thread of its own, for the coroutines of one event loop."""

import asyncio
import faulthandler
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import TypeVar

from engine.api import EngineStopped, InvalidImage, NoGrammars
from engine.core.inbox import Inbox
from engine.core.loop import STALL_SECONDS, Deliver, EngineLoop
from engine.core.namespace_ids import find_namespace, find_root
from engine.core.request import cache_tokens, validate
from engine.core.statistics import snapshot
from engine.core.step import Limits
from engine.grammar.answers import Trials, Verdict
from engine.grammar.phases import (
    Verdicts,
    all_refused,
    check_verdicts,
    grammar_plan,
    is_dispensable,
    untried,
)
from engine.grammar.state import GrammarPlan
from engine.images.queue import ImageQueue
from engine.values.images import Detail, Image, PreparedImage
from engine.values.model import ModelCard
from engine.values.request import Grammar, Request
from engine.values.stats import (
    ALL_TIERS,
    UNSALTED_ID,
    CacheTier,
    Cleared,
    DecodeStats,
    EngineStats,
    MemoryStats,
    Probed,
    RankStats,
    RequestInfo,
)
from engine.values.tokens import PackedTokens
from engine.values.tree import NodeTokens, TreeChanges, TreeSnapshot
from engine.watch.feed import TreeFeed
from engine.watch.snapshot import request_infos
from kvstore.tokens import block_digests, root_digest

logger = logging.getLogger(__name__)

T = TypeVar("T")

QUICK_TOKENS = 4096
"""The most tokens prepared on the event loop, in about 0.5 ms. More are for another thread."""

SAVE_POLLS, SAVE_POLL_SECONDS = 50, 0.02
"""How often it is checked whether prefixes have been read for the disk, before they are evicted
all the same, and the time between two checks."""

DRAIN_GRACE_SECONDS = 3.0
"""How long a drain may take after the time for requests and for the disk. The server waits for
five.
"""

STDERR = 2  # the descriptor: Python's own stream may be in the middle of a line


@dataclass(frozen=True, slots=True)
class EngineParts:
    """The parts made on the engine thread: MLX arrays belong to the thread that made them."""

    loop: EngineLoop
    card: ModelCard
    limits: Limits
    trials: Trials
    memory: Callable[[], MemoryStats]  # on any thread
    decode: Callable[[], DecodeStats]  # on any thread
    release_unused: Callable[[], None]  # memory that nothing uses, to the system; on any thread
    release_thread: Callable[[], None]  # the last call on that thread
    images: ImageQueue | None = None  # None: the model takes none
    ranks: Callable[[], RankStats] | None = None  # on any thread; None: there is one rank


Build = Callable[[Inbox, Deliver], EngineParts]


class EngineThread:
    """A running engine. Its public coroutines are the calls of the server, see
    `engine.remote.calls.Calls`; they are for one event loop. `engine.api.Engine` documents them.
    """

    def __init__(self, build: Build, deliver: Deliver, ended: Callable[[], None]) -> None:
        """Start the thread. Returns when `build` has run on it, and raises whatever `build` raises.

        `deliver` and `ended` are called on the engine thread, `ended` once the loop has ended.
        """
        self._inbox = Inbox()
        self._draining = False
        self._ended = Future[None]()
        self._ended.set_running_or_notify_cancel()  # so that a waiter cannot cancel it
        built = Future[EngineParts]()
        self._thread = threading.Thread(
            target=self._main, args=(build, deliver, ended, built), name="engine", daemon=True
        )
        self._thread.start()
        self._parts = built.result()
        self._loop, self.card = self._parts.loop, self._parts.card
        self._feed = TreeFeed(self._call, self._loop.scheduler, self._loop.sizes)

    async def submit(self, request: Request) -> None:
        """Queue a request. Its events may come before this returns.

        Raises InvalidRequest, QueueFull, NoGrammars or EngineStopped.
        """
        if self._draining:
            raise EngineStopped("the daemon is shutting down and takes no new requests")
        scheduler, metrics = self._loop.scheduler, self._loop.metrics
        metrics.received += request.n
        arrived_seconds = metrics.now()
        plan: GrammarPlan | None = None
        if request.constraint is not None or request.thinking_budget is not None:
            # An invalid request takes no worker's time.
            await asyncio.to_thread(validate, request, self._parts.limits)
            plan = grammar_plan(request, await self._tried(request), self.card.eos_token_ids)
        is_quick = len(request.prompt) + len(request.prediction) <= QUICK_TOKENS
        prepare = partial(scheduler.prepare, request, plan)
        prepared = prepare() if is_quick else await asyncio.to_thread(prepare)
        await self._call(partial(scheduler.add, prepared, arrived_seconds))

    async def abort(self, request_id: str) -> None:
        """End a request and free its blocks within a step. Does nothing if it has ended."""
        self._post_urgent(partial(self._loop.abort, request_id))

    async def check(self, request: Request) -> None:
        validate(request, self._parts.limits)
        await self._tried(request)

    async def prepare_image(self, source: str, folder: str, detail: Detail) -> PreparedImage:
        if self._parts.images is None:
            reason = self.card.images_refused
            raise InvalidImage(f"the model takes no images{reason and ': '}{reason}")
        return await self._parts.images.prepare(source, folder, detail)

    async def _tried(self, request: Request) -> Verdicts:
        """Try the request's grammars. Raises InvalidRequest if one cannot be served, and NoGrammars
        if none can.
        """
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

    async def stats(self) -> EngineStats:
        """Read the statistics at once, even while a step runs and after the loop has died."""
        parts, loop = self._parts, self._loop
        kv_events = None if loop.kv_events is None else loop.kv_events.stats()
        ranks = None if parts.ranks is None else parts.ranks()
        memory, decode = parts.memory(), parts.decode()
        return snapshot(loop.scheduler, loop.sizes, memory, decode, kv_events, ranks)

    async def clear_cache(
        self, namespace_id: str | None = None, tiers: frozenset[CacheTier] = ALL_TIERS
    ) -> Cleared:
        loop, namespace = self._loop, None
        if CacheTier.DISK in tiers:
            await asyncio.to_thread(self._clear_disk, namespace_id)
        if namespace_id is not None:
            known = await self._call(lambda: loop.namespaces)
            namespace = await asyncio.to_thread(find_namespace, namespace_id, known)
        if namespace_id is not None and namespace is None:  # it may be new, or only on disk
            await self._call(partial(loop.clear_named, namespace_id, known, tiers))
        else:
            await self._call(partial(loop.clear, namespace, tiers))
        blocks = n_bytes = 0
        while (part := await self._call(loop.forget_cleared)) is not None:
            blocks, n_bytes = blocks + part.blocks, n_bytes + part.bytes
        return Cleared(blocks, n_bytes)

    async def give_back(self, evicted_share: float) -> int:
        loop, n_evicted = self._loop, 0
        await asyncio.to_thread(self._parts.release_unused)  # which waits for no step
        if evicted_share > 0:
            if (disk := loop.scheduler.disk) is not None:
                await self._call(disk.save_coldest)
                for _ in range(SAVE_POLLS):
                    if not await self._call(lambda: disk.is_busy):
                        break
                    await asyncio.sleep(SAVE_POLL_SECONDS)
            left = ceil(evicted_share * loop.scheduler.store.pool.n_blocks)
            while left > 0 and (n := await self._call(partial(loop.evict, left))):
                n_evicted, left = n_evicted + n, left - n
        first: int | None = 0
        while first is not None:
            first = await self._call(partial(loop.give_back, first))
        await asyncio.to_thread(self._parts.release_unused)
        return n_evicted

    def _clear_disk(self, namespace_id: str | None) -> None:
        """Remove what is on disk now, which the engine thread would take long for."""
        scheduler, root = self._loop.scheduler, None
        if (disk := scheduler.disk) is None:
            return
        if namespace_id == UNSALTED_ID:
            root = root_digest(scheduler.namespaces.unsalted)
        elif namespace_id is not None:
            root = find_root(namespace_id, disk.roots())
        if namespace_id is None or root is not None:
            disk.clear_slowly(root)

    async def tree(self, since: int) -> TreeSnapshot | TreeChanges:
        return await self._feed.tree(since)

    async def node(self, node_id: int, most_tokens: int) -> NodeTokens | None:
        return await self._feed.node(node_id, most_tokens)

    async def probe(
        self,
        prompt: PackedTokens,
        cache_salt: str,
        adapter: str,
        images: tuple[Image, ...] = (),
    ) -> Probed:
        scheduler = self._loop.scheduler
        namespace, store = scheduler.namespaces.of(cache_salt, adapter), scheduler.store
        tokens = cache_tokens(prompt, images)
        cached_tokens = await self._call(partial(store.probe, namespace, tokens))
        cached = tokens.packed(0, cached_tokens)
        digests = await asyncio.to_thread(block_digests, namespace, cached, store.block_size)
        return Probed(cached_tokens, tuple(digest.hex() for digest in digests))

    async def requests(self) -> tuple[RequestInfo, ...]:
        return await self._call(partial(request_infos, self._loop.scheduler))

    def is_alive(self) -> bool:
        started = self._loop.step_started_seconds
        stalled = started is not None and self._loop.metrics.now() - started > STALL_SECONDS
        return self._thread.is_alive() and not self._inbox.is_closed and not stalled

    async def drain(self, timeout_seconds: float) -> None:
        """Refuse new requests, let running ones finish, abort the rest after `timeout_seconds`, and
        end the thread. Afterwards only `stats` may be called.

        If something hangs, the stacks of all threads are logged before the server gives up.
        """
        self._draining = True
        if self._parts.images is not None:
            await self._parts.images.close()
        disk = self._loop.scheduler.disk
        patience_seconds = (
            timeout_seconds + DRAIN_GRACE_SECONDS + (disk.shutdown_seconds if disk else 0)
        )
        faulthandler.dump_traceback_later(patience_seconds, file=STDERR)
        try:
            await self._drain(timeout_seconds)
        finally:
            faulthandler.cancel_dump_traceback_later()

    async def _drain(self, timeout_seconds: float) -> None:
        try:
            async with asyncio.timeout(timeout_seconds):
                idle = await self._call(self._loop.when_idle)
                await asyncio.wrap_future(idle)
        except TimeoutError:
            logger.warning("aborting the remaining requests after %g seconds", timeout_seconds)
        except EngineStopped:
            logger.warning("the engine had stopped before")
        self._post_urgent(self._loop.abort_all)
        self._post_urgent(self._loop.stop)
        await asyncio.wrap_future(self._ended)
        self._thread.join()

    async def _call(self, function: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._inbox.post(function))

    def _post_urgent(self, function: Callable[[], None]) -> None:
        """Post an urgent call without waiting for it. Does nothing if the engine has stopped."""
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
        except BaseException:  # a panic in Rust as well
            logger.critical("the engine loop has died", exc_info=True)
        finally:
            self._inbox.close()
            ended()
            try:
                parts.release_thread()
            except Exception:  # a drain waits for the end all the same
                logger.exception("the device's memory of the engine thread cannot be released")
            self._ended.set_result(None)


def _log_failure(future: "Future[None]") -> None:
    if not future.cancelled() and (error := future.exception()) is not None:
        logger.error("a call without a waiting caller has failed", exc_info=error)
