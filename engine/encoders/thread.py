"""An engine for encoders: it computes whole texts, and has neither a KV store nor a scheduler.

    submit -> queue | take, compute, deliver | take, compute, deliver ...

One thread owns the model. Between two forwards it takes the texts of the next out of the queue.
"""

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import count

from engine.api import EngineStopped, InvalidImage, InvalidRequest, QueueFull
from engine.core.loop import STALL_SECONDS, Deliver
from engine.core.metrics import HIT_WINDOWS_SECONDS, QueuePace
from engine.core.request import validate
from engine.core.step import Limits
from engine.encoders.queue import TextQueue, WaitingText
from engine.values.images import Detail, Image, PreparedImage
from engine.values.model import ModelCard
from engine.values.output import FinishReason, OutputEvent, Usage
from engine.values.request import Request, WaitReason
from engine.values.stats import (
    ALL_TIERS,
    CacheStats,
    CacheTier,
    Cleared,
    DraftCounts,
    DraftSource,
    EngineStats,
    Latency,
    MemoryStats,
    Probed,
    RecentHits,
    RequestInfo,
    no_latencies,
)
from engine.values.tokens import PackedTokens
from engine.values.tree import (
    HiddenNodes,
    HiddenRequests,
    NodeTokens,
    TreeArena,
    TreeChanges,
    TreeCounters,
    TreeSnapshot,
)

logger = logging.getLogger(__name__)

SHOWN_REQUESTS = 128
"""The most texts in a snapshot for dashboards."""

NO_HITS = tuple(RecentHits(seconds, 0, 0) for seconds in HIT_WINDOWS_SECONDS)
"""Nothing is looked up in a cache."""

Encode = Callable[[Sequence[PackedTokens]], Sequence[bytes]]
"""Computes one forward: for each text its vector or score, little-endian float32."""


@dataclass(frozen=True, slots=True)
class EncoderParts:
    """The parts made on the encoder's thread: MLX arrays belong to the thread that made them."""

    encode: Encode
    card: ModelCard
    limits: Limits
    memory: Callable[[], MemoryStats]  # on any thread
    release_unused: Callable[[], None]  # memory that nothing uses, to the system; on any thread
    release_thread: Callable[[], None]  # the last call on that thread


class _Phase(IntEnum):
    """What the thread does, in order."""

    SERVING = 1
    DRAINING = 2  # computes what waits, and takes no more
    STOPPING = 3  # ends after the forward that is computed
    ENDED = 4


@dataclass(slots=True)
class _Counts:
    """Sums since the start."""

    received: int = 0
    finished: int = 0
    forwards: int = 0
    tokens: int = 0


class EncoderThread:
    """A running encoder. Its public coroutines are the calls of the server, as those of
    `engine.thread.EngineThread` are; `engine.api.Engine` documents them.
    """

    def __init__(
        self, build: Callable[[], EncoderParts], deliver: Deliver, ended: Callable[[], None]
    ) -> None:
        """Start the thread. Returns when `build` has run on it, and raises whatever `build` raises.

        `deliver` and `ended` are called on the encoder's thread, `ended` once it has ended.
        """
        self._deliver = deliver
        self._changed = threading.Condition()  # guards all that follows
        self._queue = TextQueue(1)
        self._running: dict[str, WaitingText] = {}  # of the forward that is computed, by id
        self._pace = QueuePace()
        self._counts = _Counts()
        self._latencies = no_latencies()
        self._forward_began: float | None = None  # None between forwards
        self._phase = _Phase.SERVING
        self._orders = count()
        built = Future[EncoderParts]()
        self._thread = threading.Thread(
            target=self._main, args=(build, ended, built), name="encoder", daemon=True
        )
        self._thread.start()
        self._parts = built.result()
        self.card = self._parts.card

    async def submit(self, request: Request) -> None:
        """Queue a request. Its events may come before this returns.

        Raises InvalidRequest, QueueFull or EngineStopped.
        """
        await self.check(request)
        now = time.monotonic()
        with self._changed:
            if self._phase is not _Phase.SERVING:
                raise EngineStopped("the daemon is shutting down and takes no new requests")
            if request.id in self._running or any(t.request.id == request.id for t in self._queue):
                raise InvalidRequest(f"a request with id {request.id} is being served", "id")
            self._check_room(request.client, now)
            self._queue.add(WaitingText(request, now, next(self._orders)))
            self._pace.joined(1, now)
            self._counts.received += 1
            self._changed.notify_all()

    def _check_room(self, client: str, now: float) -> None:
        """Raise QueueFull unless a text of the client may wait: as in `WaitingQueue`, a client may
        have as many waiting as there are free places.
        """
        own, taken, places = (
            self._queue.of(client),
            len(self._queue),
            self._parts.limits.max_waiting,
        )
        if own + 1 > places - taken:
            seconds = self._pace.seconds_until_left(1, now)
            raise QueueFull(
                f"{taken} texts wait, {own} of them this client's, and {places} may (max_waiting)",
                max(math.ceil(seconds), 1),
            )

    async def abort(self, request_id: str) -> None:
        """End a request. A text of the forward that is computed ends at once, and its result is
        dropped.
        """
        with self._changed:
            self._abort(request_id)

    def _abort(self, request_id: str) -> None:
        text = self._queue.remove(request_id)
        if text is not None:
            self._pace.left(time.monotonic())
        else:
            text = self._running.pop(request_id, None)
        if text is not None:
            self._count_end(text, time.monotonic())
            self._deliver([_end(text, FinishReason.ABORT)])
            self._changed.notify_all()

    async def check(self, request: Request) -> None:
        if request.pooling is None:
            raise InvalidRequest("this model embeds or reranks, and writes nothing", "pooling")
        validate(request, self._parts.limits)

    async def prepare_image(self, source: str, folder: str, detail: Detail) -> PreparedImage:
        raise InvalidImage("the model embeds or reranks texts, and takes no images")

    async def stats(self) -> EngineStats:
        """Read the statistics at once, even while a forward is computed."""
        with self._changed:
            counts = replace(self._counts)
            running, waiting = len(self._running), len(self._queue)
            latencies = {
                latency: replace(each, counts=each.counts.copy())
                for latency, each in self._latencies.items()
            }
        return EngineStats(
            running=running,
            waiting=waiting,
            computed_prompt_tokens=counts.tokens,
            generated_tokens=0,
            preemptions=0,
            client_preemptions=0,
            recomputed_sequences=0,
            late_rows=0,
            steps=counts.forwards,
            drafts=dict.fromkeys(DraftSource, DraftCounts()),
            contradictions=0,
            latencies=latencies,
            cache=_no_cache(self.card.block_size),
            memory=self._parts.memory(),
        )

    async def clear_cache(
        self, namespace_id: str | None = None, tiers: frozenset[CacheTier] = ALL_TIERS
    ) -> Cleared:
        return Cleared(0, 0)

    async def give_back(self, evicted_share: float) -> int:
        await asyncio.to_thread(self._parts.release_unused)
        return 0

    async def tree(self, since: int) -> TreeSnapshot | TreeChanges:
        requests = await self.requests()
        with self._changed:
            counts, running = replace(self._counts), len(self._running)
        shown = requests[:SHOWN_REQUESTS]
        n_shown_running = min(running, len(shown))
        return TreeSnapshot(
            version=1 + counts.received + counts.forwards + counts.finished,
            time=time.time(),
            seconds=time.monotonic(),
            block_tokens=self.card.block_size,
            arena=TreeArena(0, 0, 0, 0, 0, 0),
            groups=(),
            disk=None,
            nodes=(),
            hidden=HiddenNodes(),
            namespaces=(),
            requests=shown,
            hidden_requests=HiddenRequests(
                running - n_shown_running, len(requests) - len(shown) - running + n_shown_running
            ),
            adoptions=(),
            recent_hits=NO_HITS,
            counters=TreeCounters(counts.tokens, 0, 0, 0, counts.received, 0, 0.0),
        )

    async def node(self, node_id: int, most_tokens: int) -> NodeTokens | None:
        return None

    async def probe(
        self,
        prompt: PackedTokens,
        cache_salt: str,
        adapter: str,
        images: tuple[Image, ...] = (),
    ) -> Probed:
        return Probed(0, ())

    async def requests(self) -> tuple[RequestInfo, ...]:
        with self._changed:
            running, waiting = tuple(self._running.values()), tuple(self._queue)
        return (
            *(_info(text, None) for text in running),
            *(_info(text, WaitReason.TURN) for text in waiting),
        )

    def is_alive(self) -> bool:
        began = self._forward_began
        stalled = began is not None and time.monotonic() - began > STALL_SECONDS
        return self._thread.is_alive() and self._phase is not _Phase.ENDED and not stalled

    async def drain(self, timeout_seconds: float) -> None:
        """Refuse new requests, compute the waiting ones, abort the rest after `timeout_seconds`,
        and end the thread.
        """
        await asyncio.to_thread(self._drain, timeout_seconds)

    def _drain(self, timeout_seconds: float) -> None:
        with self._changed:
            self._phase = max(self._phase, _Phase.DRAINING)
            if not self._changed.wait_for(self._is_idle, timeout_seconds):
                logger.warning("aborting the remaining texts after %g seconds", timeout_seconds)
            for request_id in [*self._running, *(text.request.id for text in self._queue)]:
                self._abort(request_id)
            self._phase = max(self._phase, _Phase.STOPPING)
            self._changed.notify_all()
        self._thread.join()

    def _is_idle(self) -> bool:
        return self._phase is _Phase.ENDED or not (self._running or len(self._queue))

    def _main(
        self,
        build: Callable[[], EncoderParts],
        ended: Callable[[], None],
        built: "Future[EncoderParts]",
    ) -> None:
        """The encoder's thread, from loading the model to the last forward."""
        try:
            parts = build()
        except BaseException as error:
            built.set_exception(error)
            return
        self._queue = TextQueue(parts.limits.step_tokens)
        built.set_result(parts)
        try:
            while self._forward(parts.encode):
                pass
        except BaseException:
            logger.critical("the encoder's thread has died", exc_info=True)
        finally:
            with self._changed:
                self._phase = _Phase.ENDED
                self._changed.notify_all()
            ended()
            try:
                parts.release_thread()
            except Exception:  # a drain waits for the end all the same
                logger.exception("the device's memory of the thread cannot be released")

    def _forward(self, encode: Encode) -> bool:
        """Wait for texts, and compute a forward. Returns False where the thread is to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._phase is _Phase.STOPPING or len(self._queue))
            if self._phase is _Phase.STOPPING:
                return False
            texts = self._queue.take()
            self._running = {text.request.id: text for text in texts}
            began = self._forward_began = time.monotonic()
            for text in texts:
                self._pace.left(began)
                self._latencies[Latency.QUEUE_WAIT].observe(began - text.arrived_seconds)
            admitted = [OutputEvent(text.request.id, 0, admission=_usage(text)) for text in texts]
            self._deliver(admitted)
        results = self._computed(encode, texts)
        with self._changed:
            now, self._forward_began = time.monotonic(), None
            self._latencies[Latency.STEP].observe(now - began)
            self._counts.forwards += 1
            self._counts.tokens += sum(text.n_tokens for text in texts)
            events = [
                result
                for text, result in zip(texts, results, strict=True)
                if self._running.get(text.request.id) is text  # not aborted meanwhile
            ]
            for event in events:
                text = self._running.pop(event.request_id)
                self._count_end(text, now)
            if events:
                self._deliver(events)
            self._changed.notify_all()
        return True

    def _computed(self, encode: Encode, texts: Sequence[WaitingText]) -> list[OutputEvent]:
        """The last events of the texts of a forward. An error of the model ends them alone."""
        try:
            pooled = encode([text.request.prompt for text in texts])
        except Exception as error:
            logger.exception("a forward failed")
            message = f"the forward failed: {type(error).__name__}: {error}"
            return [_end(text, FinishReason.ERROR, error=message) for text in texts]
        return [
            _end(text, FinishReason.LENGTH, pooled=each)
            for text, each in zip(texts, pooled, strict=True)
        ]

    def _count_end(self, text: WaitingText, now: float) -> None:
        self._counts.finished += 1
        self._latencies[Latency.REQUEST].observe(now - text.arrived_seconds)


def _usage(text: WaitingText) -> Usage:
    return Usage(text.n_tokens, cached_tokens=0, completion_tokens=0)


def _end(
    text: WaitingText, reason: FinishReason, pooled: bytes = b"", error: str | None = None
) -> OutputEvent:
    """The last event of a text."""
    usage = _usage(text)
    return OutputEvent(
        text.request.id, 0, pooled=pooled, finish_reason=reason, usage=usage, error=error
    )


def _info(text: WaitingText, waits_for: WaitReason | None) -> RequestInfo:
    """A live text, none of whose tokens counts as computed before all are."""
    return RequestInfo(
        request_id=text.request.id,
        index=0,
        waits_for=waits_for,
        prompt_tokens=text.n_tokens,
        cached_tokens=0,
        computed_tokens=0,
        output_tokens=0,
        blocks=0,
    )


def _no_cache(block_size: int) -> CacheStats:
    """The statistics of a KV store that is not there."""
    return CacheStats(
        block_size=block_size,
        blocks_total=0,
        blocks_free=0,
        blocks_cached=0,
        blocks_held=0,
        blocks_pinned=0,
        blocks_shared=0,
        blocks_saved=0,
        saved_bytes=0,
        arena_bytes=0,
        nodes=0,
        queried_tokens=0,
        hit_tokens=0,
        warmed_tokens=0,
        evictions=0,
        tail_hit_tokens=0,
        prefix_copies=0,
        fork_copies=0,
        groups=(),
        recent_hits=NO_HITS,
        disk=None,
    )
