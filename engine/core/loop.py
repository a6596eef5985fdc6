"""The engine's loop: inbox -> plan -> pipeline -> emit. Everything here is one thread's."""

import logging
from collections.abc import Callable, Collection
from math import ceil

from engine.api import QueueFull
from engine.constraints.remote.answers import Answers
from engine.core.idle_recount import IdleRecount
from engine.core.inbox import Inbox
from engine.core.metrics import LatencyTracker
from engine.core.pipeline import Pipeline
from engine.core.queue import NoRoom
from engine.core.request import Submission
from engine.core.scheduler import Scheduler
from engine.core.sequence import LiveSequence
from engine.core.statistics import clear, hit_count, loop_stats
from engine.core.step import ModelRunner
from engine.values.output import OutputEvent
from engine.values.stats import ALL_TIERS, CacheTier, Cleared, HitRecord, LoopStats
from engine.watch.snapshot import find_namespace, find_root
from kvstore.sizes import StorageBytes
from kvstore.tokens import root_digest
from kvstore.types import Namespace

logger = logging.getLogger(__name__)

Deliver = Callable[[list[OutputEvent]], None]
"""Delivers the events of one step, at least one. Must not block."""


class EngineLoop:
    """Takes turns until it is stopped, and sleeps in the inbox while there is nothing to compute.

    `stats` and `step_started_seconds` may be read by any thread: each is replaced whole. `stats`
    include what an event or an answer reports before that is delivered.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        inbox: Inbox,
        deliver: Deliver,
        latency: LatencyTracker,
        sizes: StorageBytes,
        answers: Answers,
    ) -> None:
        self.scheduler = scheduler
        self._disk = scheduler.disk
        self._unsalted = scheduler.namespaces.unsalted
        self.latency = latency
        self._pipeline = Pipeline(scheduler, runner, answers, latency)
        self._answers = answers
        self._inbox = inbox
        self._recount = IdleRecount(scheduler.store, inbox, latency.now)
        self._deliver = deliver
        self._sizes = sizes
        self._hits = HitRecord()
        self._stopping = False
        self._is_waiting = False  # for the disk alone
        self._when_idle: list[Callable[[], None]] = []
        self.step_started_seconds: float | None = None  # None between steps
        self.stats: LoopStats
        self._publish()

    def submit(self, submission: Submission, arrived_seconds: float) -> None:
        """Raises InvalidRequest or QueueFull."""
        try:
            self.scheduler.add(submission)
        except NoRoom as refusal:
            wait_seconds = self.latency.seconds_until_left(refusal.departures)
            raise QueueFull(str(refusal), max(ceil(wait_seconds), 1)) from None
        self.latency.arrived(submission.request, arrived_seconds)

    def abort(self, request_id: str) -> None:
        """Does nothing when the request has ended, or never was."""
        self._emit(self.scheduler.abort(request_id))

    def abort_all(self) -> None:
        for request_id in {s.request.id for s in self.live()}:
            self.abort(request_id)

    def clear(
        self, namespace: Namespace | None = None, tiers: Collection[CacheTier] = ALL_TIERS
    ) -> Cleared:
        """Forget all that no running request holds, of one namespace or of all."""
        if CacheTier.DISK in tiers:
            self._disk.clear(namespace)
        cleared = Cleared(blocks=0, bytes=0)
        if CacheTier.MEMORY in tiers:
            self._disk.forget(namespace)
            self.scheduler.speculator.clear(namespace)
            cleared = clear(self.scheduler.store, self._sizes, namespace)
            self._recount.changed()
        self._publish()
        return cleared

    @property
    def namespaces(self) -> frozenset[Namespace]:
        """All that can be cleared, except salted ones that the disk alone has."""
        return self._disk.namespaces.union(self.scheduler.store.index.namespaces, [self._unsalted])

    def clear_named(
        self, name: str, others: Collection[Namespace], tiers: Collection[CacheTier]
    ) -> Cleared:
        """Clear the namespace with this id, in memory or on disk alone, if there is one. `others`
        are known not to have it.

        All in one turn: what is loaded between a look and a clear would be found in neither place.
        """
        namespace = find_namespace(name, self.namespaces.difference(others))
        if namespace is not None:
            return self.clear(namespace, tiers)
        if CacheTier.DISK in tiers:
            salted = self._disk.roots() - {root_digest(self._unsalted)}  # that one has been found
            if (root := find_root(name, salted)) is not None:
                self._disk.clear_root(root)
        return Cleared(blocks=0, bytes=0)

    def when_idle(self, notify: Callable[[], None]) -> None:
        """Call `notify` as soon as no sequence is live."""
        self._when_idle.append(notify)

    def stop(self) -> None:
        """End the loop after this turn."""
        self._stopping = True

    def run(self) -> None:
        """Take turns until stopped. Raises only what is a fault of the loop itself."""
        try:
            while not self._stopping:
                self.turn()
            self._write_rest()
        finally:
            self._notify_idle()  # nobody waits for a loop that has ended
            self._disk.close()
            self._answers.close()

    def turn(self) -> None:
        """Take in what has arrived, then compute one step if there is one."""
        if self.is_idle:
            self._rest()
        elif self._is_waiting:
            self._inbox.wait(self._disk.wait_seconds())
        self._inbox.handle()
        if not self.is_idle:
            self._step()
        if self.is_idle:
            self._notify_idle()

    @property
    def is_idle(self) -> bool:
        """Nothing is to be computed, and nothing is being."""
        return self._pipeline.is_empty and not self.scheduler.has_work

    def _rest(self) -> None:
        known = self._recount.n_problems
        self._recount.rest(self._disk.wait_seconds())
        if self._recount.n_problems != known:
            self._publish()

    def _notify_idle(self) -> None:
        waiters, self._when_idle = self._when_idle, []
        for notify in waiters:
            notify()

    def _step(self) -> None:
        self.step_started_seconds = self.latency.now()
        self._recount.changed()
        news = self._pipeline.collect_early()
        plan = self.scheduler.plan()
        self.latency.scheduled(self.scheduler.running)
        self._emit(self.scheduler.take_admissions())
        self._emit(news + self._pipeline.advance(plan))
        if (settled := self._pipeline.sample()) is not None:
            self._emit(settled)
        is_resting = self._pipeline.is_empty and not plan.is_due
        awaits_answers = bool(self.scheduler.unanswered)
        self._is_waiting = is_resting and self._disk.is_loading and not awaits_answers
        self.step_started_seconds = None

    def _write_rest(self) -> None:
        """Write what is dirty to disk, as far as there is time for it."""
        self._disk.end()
        while self._disk.is_ending:
            self.turn()

    def _emit(self, events: list[OutputEvent]) -> None:
        """Publish statistics, which an admission changes without an event, then deliver."""
        self.latency.emitted(events)
        self._publish()
        if events:
            self._deliver(events)

    def _publish(self) -> None:
        self._hits = self._hits.noted(hit_count(self.scheduler, self.latency.now()))
        self.stats = loop_stats(
            self.scheduler, self.latency, self._sizes, self._hits, self._recount.n_problems
        )

    def live(self) -> tuple[LiveSequence, ...]:
        return self.scheduler.running + self.scheduler.waiting
