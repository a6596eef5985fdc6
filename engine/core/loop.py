"""The engine's loop. One step is computed while the next is planned and the last one's tokens are
delivered:

    plan(2) submit(2) collect(1) commit(1) deliver(1) sample(2) | plan(3) submit(3) collect(2) ...

What a step samples depends on the tokens of the step before: masks, penalties, ends. So a step is
submitted before that one is collected, and samples after. Everything here is one thread's.
"""

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import ParamSpec, TypeVar

from engine.api import QueueFull
from engine.constraints.stage import GrammarStage
from engine.core.idle_recount import IdleRecount
from engine.core.inbox import Inbox
from engine.core.queue import NoRoom
from engine.core.request import Submission
from engine.core.scheduler import Scheduler, Step
from engine.core.sequence import LiveSequence
from engine.core.statistics import clear
from engine.core.step import ModelRunner, RunnerLost, StepResult
from engine.values.output import OutputEvent
from engine.values.stats import ALL_TIERS, CacheTier, Cleared
from engine.watch.snapshot import find_namespace, find_root
from kvstore.sizes import StorageBytes
from kvstore.tokens import root_digest
from kvstore.types import Namespace

logger = logging.getLogger(__name__)

Deliver = Callable[[list[OutputEvent]], None]
"""Delivers the events of one step, at least one. Must not block."""

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Failure:
    """What the runner has raised."""

    message: str


class EngineLoop:
    """Takes turns until it is stopped, and sleeps in the inbox while there is nothing to compute.

    `step_started_seconds` may be read by any thread.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        inbox: Inbox,
        deliver: Deliver,
        sizes: StorageBytes,
        grammar: GrammarStage | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.metrics = scheduler.metrics
        self._runner = runner
        self._inbox = inbox
        self._deliver = deliver
        self.sizes = sizes
        self._grammar = grammar
        self._recount = IdleRecount(scheduler.store, inbox, self.metrics.now)
        self._in_flight: Step | None = None
        self._device_free_seconds = (
            0.0  # of the clock: since when the step in flight had the device
        )
        self._follows = False  # the next step follows one that was collected before it was planned
        self._loading_steps: list[int] = []  # that have filled in blocks since that time
        self._step_seconds = 0.0  # of the last step, without what it waited for grammars
        self._stopping = False
        self._waits_for_disk = False  # nothing is to be computed until something is loaded
        self._when_idle: list[Callable[[], None]] = []
        self.step_started_seconds: float | None = None  # None between steps

    def submit(self, submission: Submission, arrived_seconds: float) -> None:
        """Raises InvalidRequest or QueueFull."""
        try:
            self.scheduler.add(submission, arrived_seconds)
        except NoRoom as refusal:
            wait_seconds = self.metrics.seconds_until_left(refusal.departures)
            raise QueueFull(str(refusal), max(ceil(wait_seconds), 1)) from None

    def abort(self, request_id: str) -> None:
        """Does nothing when the request has ended, or never was."""
        self._emit(self.scheduler.abort(request_id))

    def abort_all(self) -> None:
        for request_id in {sequence.request.id for sequence in self.live()}:
            self.abort(request_id)

    def clear(
        self, namespace: Namespace | None = None, tiers: Collection[CacheTier] = ALL_TIERS
    ) -> Cleared:
        """Forget all that no running request holds, of one namespace or of all."""
        scheduler = self.scheduler
        if scheduler.disk is not None and CacheTier.DISK in tiers:
            scheduler.disk.clear(namespace)
        if CacheTier.MEMORY not in tiers:
            return Cleared(blocks=0, bytes=0)
        if scheduler.disk is not None:
            scheduler.disk.forget(namespace)
        if scheduler.drafts is not None:
            scheduler.drafts.clear(namespace)
        self._recount.changed()
        return clear(scheduler.store, self.sizes, namespace)

    @property
    def namespaces(self) -> frozenset[Namespace]:
        """All that can be cleared, except salted ones that the disk alone has."""
        scheduler = self.scheduler
        disk, tree = scheduler.disk, scheduler.store.tree
        found = frozenset[Namespace]() if disk is None else disk.namespaces
        return found.union(() if tree is None else tree.roots, [scheduler.namespaces.unsalted])

    def clear_named(
        self, name: str, others: Collection[Namespace], tiers: Collection[CacheTier]
    ) -> Cleared:
        """Clear the namespace with this id, in memory or on disk alone, if there is one. `others`
        are known not to have it.

        All of it in one turn: what is loaded between a look and a clear would be found in neither
        place.
        """
        namespace = find_namespace(name, self.namespaces.difference(others))
        if namespace is not None:
            return self.clear(namespace, tiers)
        disk = self.scheduler.disk
        if disk is not None and CacheTier.DISK in tiers:
            salted = disk.roots() - {root_digest(self.scheduler.namespaces.unsalted)}
            if (root := find_root(name, salted)) is not None:
                disk.clear_root(root)
        return Cleared(blocks=0, bytes=0)

    def when_idle(self, notify: Callable[[], None]) -> None:
        """Call `notify` as soon as no sequence is live."""
        self._when_idle.append(notify)

    def stop(self) -> None:
        """End the loop after this turn."""
        self._stopping = True

    def live(self) -> tuple[LiveSequence, ...]:
        return self.scheduler.running + self.scheduler.waiting

    @property
    def is_idle(self) -> bool:
        """Whether nothing is to be computed, and nothing is being computed."""
        return self._in_flight is None and not self.scheduler.has_work

    @property
    def in_flight(self) -> Step | None:
        """The step that is being computed."""
        return self._in_flight

    @property
    def sleeps(self) -> bool:
        """Whether the next turn begins with a sleep that a call or the disk ends."""
        return self.is_idle or self._waits_for_disk

    def run(self) -> None:
        """Take turns until stopped. Raises only what is a fault of the loop itself."""
        disk = self.scheduler.disk
        try:
            while not self._stopping:
                self.turn()
            if disk is not None:  # write what is dirty, as far as there is time for it
                disk.end()
                while disk.is_ending:
                    self.turn()
        finally:
            self._notify_idle()  # nobody waits for a loop that has ended
            if disk is not None:
                disk.close()
            if self._grammar is not None:
                self._grammar.close()

    def turn(self) -> None:
        """Take in what has arrived, then compute one step if there is one."""
        if self.is_idle:
            self._recount.rest(self._disk_wait_seconds())
            self.metrics.contradictions = self._recount.n_problems
        elif self._waits_for_disk:
            self._inbox.wait(self._disk_wait_seconds())
        self._inbox.handle()
        if not self.is_idle:
            self.step_started_seconds = self.metrics.now()
            self._recount.changed()
            self._step()
            self.step_started_seconds = None
        if self.is_idle:
            self._notify_idle()

    def _step(self) -> None:
        """Plan and submit a step, and collect the one before. A step with drafts is collected
        before the next is planned: only then is known which tokens its sequences have.
        """
        events = list[OutputEvent]()
        before = self._in_flight
        if before is not None and (before.n_drafts or self.scheduler.prefers_sync):
            events = self._collect_first(before)
        step = self.scheduler.plan()
        self._emit(self.scheduler.take_admissions())
        grammar = self._grammar
        if grammar is not None and grammar.is_needed:
            grammar.ask(step)
        self._emit(events + self._advance(step))
        if self._in_flight is not None:
            self._emit(self._sample(self._in_flight))
        disk, has_rested = self.scheduler.disk, step is None and self._in_flight is None
        is_loading = has_rested and disk is not None and disk.is_loading
        self._waits_for_disk = is_loading and not self.scheduler.sequences.unanswered

    def _collect_first(self, step: Step) -> list[OutputEvent]:
        """Collect the step in flight before the next one is planned. Returns its events."""
        began, self._in_flight = self._device_free_seconds, None
        result = _attempt(self._runner.collect)
        if isinstance(result, _Failure):
            return self.scheduler.fail(step, result.message)
        self._follows = (
            True  # so the time that the device waits for a plan counts as the next step's
        )
        return self._commit(step, result, began)

    def _advance(self, step: Step | None) -> list[OutputEvent]:
        """Submit a step and collect the one before. Returns the events of the latter.

        A step that fails ends its own sequences; if it fails when it is collected, also those of
        the step submitted after it. Raises RunnerLost.
        """
        before, self._in_flight = self._in_flight, None
        began, follows, self._follows = self._device_free_seconds, self._follows, False
        if not follows:
            self._device_free_seconds = self.metrics.now()
        if before is None:
            self._loading_steps = []
        if step is not None and step.is_loading:  # while the step before has the device
            self._loading_steps.append(step.plan.number)
        events = list[OutputEvent]()
        if step is not None:
            failure = _attempt(self._runner.submit, step.plan)
            if failure is not None:
                # Now, for a sequence that ends with the step before must not count on this one.
                events, step = self.scheduler.fail(step, failure.message), None
        if before is None:
            self._in_flight = step
            grammar = self._grammar
            if step is None and grammar is not None and grammar.is_needed:
                events += grammar.rest()
            return events
        result = _attempt(self._runner.collect)
        if isinstance(result, _Failure):
            events += self.scheduler.fail(before, result.message)
            return events if step is None else events + self.scheduler.fail(step, result.message)
        self._in_flight = step
        return events + self._commit(before, result, began)

    def _commit(self, step: Step, result: StepResult, began: float) -> list[OutputEvent]:
        """Commit a collected step. The next one has the device from now on."""
        self._device_free_seconds = now = self.metrics.now()
        seconds = now - began
        self.metrics.step_seconds.observe(seconds)
        loading_steps, self._loading_steps = self._loading_steps, []
        grammar, waited_seconds = self._grammar, 0.0
        if grammar is not None:
            waited_seconds, grammar.waited_seconds = grammar.waited_seconds, 0.0
        self._step_seconds = max(seconds - waited_seconds, 0.0)
        if self._step_seconds > waited_seconds:  # else it says nothing of the model
            self.scheduler.observe(step, loading_steps, seconds)
        events = self.scheduler.commit(step, result)
        if grammar is not None and grammar.is_needed:
            events += grammar.after_commit(self._step_seconds)
        return events

    def _sample(self, step: Step) -> list[OutputEvent]:
        """Have the rest of the step computed and its tokens sampled. Returns the events of
        sequences whose grammars have been answered meanwhile, and of all if the step has failed.
        """
        grammar = self._grammar
        if grammar is None or not grammar.is_needed:
            failure = _attempt(self._runner.sample, None)
            events = list[OutputEvent]()
        else:
            masks = partial(grammar.masks, step, self._step_seconds)
            failure = _attempt(self._runner.sample, masks)
            events = grammar.take_unblocked()
        if failure is not None:
            self._in_flight = None
            events += self.scheduler.fail(step, failure.message)
        return events

    def _disk_wait_seconds(self) -> float | None:
        """How long the loop may sleep; None: until there is a call."""
        disk = self.scheduler.disk
        return None if disk is None else disk.wait_seconds()

    def _notify_idle(self) -> None:
        waiters, self._when_idle = self._when_idle, []
        for notify in waiters:
            notify()

    def _emit(self, events: list[OutputEvent]) -> None:
        if events:
            self._deliver(events)


def _attempt(act: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | _Failure:
    """What `act` returns, or that it has raised. Raises RunnerLost."""
    try:
        return act(*args, **kwargs)
    except RunnerLost:
        raise
    except Exception as error:
        logger.exception("a step failed")
        return _Failure(f"the step failed: {type(error).__name__}: {error}")
