"""The engine as the server sees it: a client of the process that serves the model."""

import asyncio
import logging
import socket
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import TypeAlias

from engine.api import (
    EngineError,
    EngineStopped,
    EventSink,
    InvalidRequest,
    ModelError,
    QueueFull,
    Report,
)
from engine.process.child import ChildProcess
from engine.remote.calls import Calls
from engine.remote.connection import Connection
from engine.remote.wire import Call, P, R
from engine.values.images import Detail, Image, PreparedImage
from engine.values.model import ModelCard, Tokenizer
from engine.values.output import FinishReason, OutputEvent
from engine.values.request import RefusalReason, Request
from engine.values.settings import EngineConfig
from engine.values.stats import (
    ALL_TIERS,
    CacheTier,
    Cleared,
    EngineStats,
    Probed,
    RequestInfo,
    SequenceCounts,
)
from engine.values.tokens import PackedTokens
from engine.values.tree import NodeTokens, TreeChanges, TreeSnapshot

GIVE_BACK_SECONDS = 10.0
"""How long `give_back` waits for a process: for steps in between, and for writes to disk."""

ANSWER_SECONDS = 1.0
"""How long `stats`, `requests` and `tree` wait for a process, which may have been stopped from
outside.
"""

_REASONS = {InvalidRequest: RefusalReason.INVALID, QueueFull: RefusalReason.QUEUE_FULL}

StartProcess: TypeAlias = Callable[[], tuple[socket.socket, ChildProcess]]
"""Starts a process that serves one engine. Returns it with the socket to it. Raises OSError."""

logger = logging.getLogger(__name__)


class RequestCounters:
    """Counts sequences where callers get their events. So the sums are right however a request
    ends, including when the engine has never received it, or has died.

    Thread-safe, because callers may use several event loops.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._received = 0
        self._refused = dict.fromkeys(RefusalReason, 0)
        self._finished = dict.fromkeys(FinishReason, 0)

    def received(self, n_sequences: int) -> None:
        """Count the sequences of a new request."""
        with self._lock:
            self._received += n_sequences

    def refused(self, error: EngineError, n_sequences: int) -> None:
        """Count sequences that the engine has refused, with this error."""
        with self._lock:
            self._refused[_REASONS.get(type(error), RefusalReason.STOPPED)] += n_sequences

    def finished(self, reason: FinishReason, n_sequences: int = 1) -> None:
        """Count sequences that have ended."""
        with self._lock:
            self._finished[reason] += n_sequences

    def counts(self) -> SequenceCounts:
        """The counts as of now."""
        with self._lock:
            return SequenceCounts(self._received, self._refused.copy(), self._finished.copy())


class RemoteSubmission:
    """Implements `engine.api.Submission`: one request, and the sink of its events.

    Its methods are called on the event loop that submitted it, but for `answered`.
    """

    def __init__(self, engine: "RemoteEngine", request: Request, sink: EventSink) -> None:
        self.loop = asyncio.get_running_loop()
        self.request = request
        self._engine = engine
        self._sink = sink
        self._live = set(range(request.n))  # sequences that have not ended
        self._call: int | None = None  # the number of the call with which it was sent
        self._is_accepted = False
        self._has_engine_stopped = False
        engine.counters.received(request.n)

    def send(self) -> None:
        """Send the request to the process. Raises EngineStopped."""
        connection = self._engine.connection
        self._call, accepted = connection.send(Calls.submit, self.request)
        accepted.add_done_callback(self.answered)

    def answered(self, accepted: Future[None]) -> None:
        """The process has accepted the request or not. Called on any thread."""
        error = accepted.exception()
        _call(self.loop, self._accept if error is None else partial(self.fail, error))

    def _accept(self) -> None:
        self._is_accepted = True
        if self._has_engine_stopped:
            self.engine_stopped()

    def take(self, event: OutputEvent) -> None:
        """Pass on an event, unless its sequence has ended."""
        if event.index not in self._live:
            return
        self._is_accepted = True  # its acceptance may come later, or be lost with the process
        if event.finish_reason is not None:
            self._live.remove(event.index)
            self._engine.counters.finished(event.finish_reason)
        if not event.prompt_logprobs:
            self._sink.put(event)
            return
        for index in sorted(self._live):  # the prompt is theirs, too
            self._sink.put(replace(event, index=index))

    def fail(self, error: BaseException) -> None:
        """The request is not served. An error that is none of the engine's says nothing of whether
        the process has accepted it.
        """
        if not self._live:
            return
        if self._is_accepted and isinstance(error, EngineStopped):
            self.engine_stopped()
            return
        if isinstance(error, EngineError):
            self._engine.counters.refused(error, len(self._live))
            self._live.clear()
        else:
            self._abort()
        self._sink.fail(error)

    def engine_stopped(self) -> None:
        """Fail the request if a stopped engine has left a sequence of it unfinished. A request that
        the engine has not accepted waits for its refusal.
        """
        self._has_engine_stopped = True
        if not self._is_accepted or not self._live:
            return
        self._engine.counters.finished(FinishReason.ERROR, len(self._live))
        self._live.clear()
        self._sink.fail(EngineStopped("the engine has stopped"))

    def end(self) -> None:
        """See `engine.api.Submission`."""
        self._engine.submissions.remove(self)
        if self._live:
            self._abort()

    def _abort(self) -> None:
        self._engine.counters.finished(FinishReason.ABORT, len(self._live))
        self._live.clear()
        if self._call is not None:
            self._engine.connection.cancel(self._call)  # the engine may have accepted it already
            with suppress(EngineStopped):
                self._engine.connection.send(Calls.abort, self.request.id)


class Submissions:
    """The requests that the process computes. Gives each its events, with one wake-up of each event
    loop a step.
    """

    def __init__(self) -> None:
        self._by_id: dict[str, RemoteSubmission] = {}

    def add(self, submission: RemoteSubmission) -> None:
        """Raises InvalidRequest if another request with the same id is being served."""
        id = submission.request.id
        if self._by_id.setdefault(id, submission) is not submission:
            raise InvalidRequest(f"a request with id {id} is being served", "id")

    def remove(self, submission: RemoteSubmission) -> None:
        """Drop its events from now on. Does nothing if it is not there."""
        if self._by_id.get(submission.request.id) is submission:
            del self._by_id[submission.request.id]

    def deliver(self, events: list[OutputEvent]) -> None:
        """Give the events to their requests, from any thread."""
        batches: defaultdict[asyncio.AbstractEventLoop, EventBatch] = defaultdict(list)
        for event in events:
            if (submission := self._by_id.get(event.request_id)) is not None:
                batches[submission.loop].append((submission, event))
        for loop, batch in batches.items():
            _call(loop, partial(_take_all, batch))

    def engine_stopped(self) -> None:
        """No more events will come."""
        for submission in tuple(self._by_id.values()):
            _call(submission.loop, submission.engine_stopped)


EventBatch: TypeAlias = list[tuple[RemoteSubmission, OutputEvent]]


def _take_all(batch: EventBatch) -> None:
    for submission, event in batch:
        submission.take(event)


def _call(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    try:
        loop.call_soon_threadsafe(function)
    except RuntimeError:  # the event loop has been closed
        logger.debug("dropped events of a closed event loop")


def tokenizer_of(card: ModelCard) -> Tokenizer:
    """The tokenizer of the model of that card, read from its checkpoint."""
    from engine.text.tokenizer import open_tokenizer  # noqa: PLC0415 - transformers takes a second

    return open_tokenizer(card)


class RemoteEngine:
    """Implements `engine.api.Engine`. Make it with `start`."""

    def __init__(
        self,
        connection: Connection,
        submissions: Submissions,
        card: ModelCard,
        tokenizer: Tokenizer,
        stats: EngineStats,
    ) -> None:
        """`stats` are returned until there are later ones."""
        self.connection = connection
        self.submissions = submissions
        self.card = card
        self.tokenizer = tokenizer
        self._last_stats = stats
        self._last_requests: tuple[RequestInfo, ...] = ()
        self.counters = RequestCounters()

    @classmethod
    async def start(
        cls,
        start_process: StartProcess,
        config: EngineConfig,
        report: Report,
        open_tokenizer: Callable[[ModelCard], Tokenizer] = tokenizer_of,
    ) -> "RemoteEngine":
        """Returns when the process has loaded the model. Raises what loading raises. The process is
        killed if this is cancelled.
        """
        submissions = Submissions()
        connected = await asyncio.to_thread(start_process)
        connection = Connection(*connected, submissions.deliver, report, submissions.engine_stopped)
        log_level = logging.getLogger().getEffectiveLevel()
        try:
            card = await connection.call(Calls.load, config, log_level)
            stats = await connection.call(Calls.stats)
            tokenizer = await asyncio.to_thread(open_tokenizer, card)
            return cls(connection, submissions, card, tokenizer, stats)
        except EngineStopped as error:
            how = await connection.ended()
            connection.kill()
            raise ModelError(how) from error
        except BaseException:
            connection.kill()
            raise

    def generate(self, request: Request, sink: EventSink) -> RemoteSubmission:
        submission = RemoteSubmission(self, request, sink)
        try:
            self.submissions.add(submission)
            submission.send()
        except EngineError as error:
            submission.fail(error)
        return submission

    async def check(self, request: Request) -> None:
        await self.connection.call(Calls.check, request)

    async def prepare_image(self, source: str, folder: str, detail: Detail) -> PreparedImage:
        number, result = self.connection.send(Calls.prepare_image, source, folder, detail)
        try:
            return await asyncio.wrap_future(result)
        finally:
            self.connection.cancel(number)

    async def clear_cache(
        self, namespace_id: str | None = None, tiers: frozenset[CacheTier] = ALL_TIERS
    ) -> Cleared:
        return await self.connection.call(Calls.clear_cache, namespace_id, tiers)

    async def give_back(self, evicted_share: float) -> int:
        async with asyncio.timeout(GIVE_BACK_SECONDS):
            return await self.connection.call(Calls.give_back, evicted_share)

    async def probe(
        self,
        prompt: PackedTokens,
        cache_salt: str,
        adapter: str,
        images: tuple[Image, ...] = (),
    ) -> Probed:
        return await self.connection.call(Calls.probe, prompt, cache_salt, adapter, images)

    async def node(self, node_id: int, most_tokens: int) -> NodeTokens | None:
        return await self.connection.call(Calls.node, node_id, most_tokens)

    async def stats(self) -> EngineStats:
        with suppress(EngineStopped, TimeoutError):
            self._last_stats = await self._call_with_timeout(Calls.stats)
        return replace(self._last_stats, sequences=self.counters.counts())

    async def tree(self, since: int) -> TreeSnapshot | TreeChanges:
        return await self._call_with_timeout(Calls.tree, since)

    async def requests(self) -> tuple[RequestInfo, ...]:
        with suppress(TimeoutError):
            self._last_requests = await self._call_with_timeout(Calls.requests)
        return self._last_requests

    def is_alive(self) -> bool:
        return self.connection.is_alive()

    async def ended(self) -> str:
        return await self.connection.ended()

    async def drain(self, timeout_seconds: float) -> None:
        with suppress(EngineStopped):  # then there is nothing to wait for
            await self.connection.call(Calls.drain, timeout_seconds)
            self._last_stats = await self.connection.call(Calls.stats)
        await asyncio.to_thread(self.connection.close)

    async def _call_with_timeout(
        self, call: Call[P, R], *arguments: P.args, **named: P.kwargs
    ) -> R:
        """The result of a call. Raises TimeoutError after ANSWER_SECONDS, and EngineStopped."""
        number, result = self.connection.send(call, *arguments, **named)
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return await asyncio.wrap_future(result)
        finally:
            self.connection.cancel(number)
