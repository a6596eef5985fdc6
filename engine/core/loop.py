"""The engine's loop. While a step is computed, the next is planned and the last one's tokens are
delivered:

    plan(2) submit(2) collect(1) commit(1) deliver(1) launch(2) draw(2) | plan(3) submit(3) ...

Sampling depends on the tokens of the previous step: masks, penalties, ends. So a step is submitted
before the previous one is collected, and drawn after. All of this is on one thread.
"""

import logging
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import TYPE_CHECKING

from engine.core.idle_recount import IdleRecount
from engine.core.inbox import Inbox
from engine.core.namespace_ids import find_namespace, find_root
from engine.core.scheduler import Scheduler
from engine.core.sequence import Step
from engine.core.statistics import forget_cleared
from engine.core.step import (
    NO_STEP_MASKS,
    GiveBack,
    ModelRunner,
    RunnerLost,
    StepLost,
    StorageLost,
)
from engine.grammar.stage import GrammarStage
from engine.values.output import OutputEvent
from engine.values.stats import ALL_TIERS, CacheTier, Cleared
from kvstore.ops import used_ids
from kvstore.sizes import StorageBytes
from kvstore.tokens import root_digest
from kvstore.types import BlockId, Namespace

if TYPE_CHECKING:  # importing zmq takes 80 ms
    from engine.kv_events.publisher import KVEventPublisher

logger = logging.getLogger(__name__)

GIVEN_AT_ONCE = 500
"""Blocks that are evicted, or whose memory is given back, between two steps."""

CLEARED_AT_ONCE = 500
"""Blocks that a cleared cache gives back between two steps, which takes a millisecond or two."""

STALL_SECONDS = 600.0
"""A step that takes longer than this counts as hung. The slowest real step takes seconds."""

Deliver = Callable[[list[OutputEvent]], None]
"""Delivers the events of one step, at least one. Must not block."""


class EngineLoop:
    """Takes turns until it is stopped, and sleeps in the inbox while there is nothing to compute.

    Any thread may read `step_started_seconds`. While `waits_for_disk`, there is nothing to compute
    until something is loaded.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        inbox: Inbox,
        deliver: Deliver,
        sizes: StorageBytes,
        grammar: GrammarStage | None = None,
        rest: Callable[[], None] | None = None,
        kv_events: "KVEventPublisher | None" = None,
        give_back: GiveBack | None = None,
    ) -> None:
        """`rest` is called when there is nothing left to compute, and before work begins again.
        Without `give_back` the storage keeps its memory.
        """
        self._give_back = give_back
        self.scheduler = scheduler
        self.metrics = scheduler.metrics
        self._runner = runner
        self._inbox = inbox
        self._deliver = deliver
        self.sizes = sizes
        self._grammar = grammar
        self._rest = rest
        self.kv_events = kv_events
        model = None if scheduler.drafts is None else scheduler.drafts.model
        draft_store = None if model is None else model.store
        self._recount = IdleRecount(
            scheduler.store, inbox, self.metrics.now, draft_store, scheduler.images
        )
        self.in_flight: Step | None = None
        self.waits_for_disk = False
        self.step_started_seconds: float | None = None  # None between steps
        self._device_free_seconds = 0.0  # of the clock, when the step in flight got the device
        self._loading_steps: list[int] = []  # numbers of steps that filled in blocks since then
        self._step_seconds = 0.0  # of the last step, without its wait for grammars
        self._stopping = False
        self._idle_waiters: list[Future[None]] = []

    def abort(self, request_id: str) -> None:
        """End a request's sequences. Does nothing if the request has ended, or is unknown."""
        self.scheduler.abort(request_id)
        self._deliver_events()

    def abort_all(self) -> None:
        for request_id in {sequence.request.id for sequence in self.scheduler.live}:
            self.abort(request_id)

    def clear(
        self, namespace: Namespace | None = None, tiers: Collection[CacheTier] = ALL_TIERS
    ) -> None:
        """Forget everything that no running request holds, of one namespace or of all. Nothing of
        it is found any more; `forget_cleared` frees its memory.
        """
        scheduler = self.scheduler
        if scheduler.disk is not None and CacheTier.DISK in tiers:
            scheduler.disk.clear(namespace)
        if CacheTier.MEMORY not in tiers:
            return
        if scheduler.drafts is not None:
            scheduler.drafts.clear(namespace)
        if scheduler.images is not None:
            scheduler.images.forget_unneeded()
        self._clear_blocks(namespace)

    def _clear_blocks(self, namespace: Namespace | None) -> None:
        """Forget the blocks of one namespace, or all, that no running request holds, those that are
        being loaded and pinned ones among them.
        """
        scheduler = self.scheduler
        if scheduler.disk is not None:
            scheduler.disk.forget(namespace)
        scheduler.pins.clear(namespace)
        self._recount.changed()
        scheduler.store.clear(namespace)

    def forget_cleared(self) -> Cleared | None:
        """Free a part of what has been cleared. None where nothing is left to do. What a request
        has been given meanwhile is not counted.
        """
        self._recount.changed()
        cleared = forget_cleared(self.scheduler.store, self.sizes, CLEARED_AT_ONCE)
        drafts = self.scheduler.drafts
        if cleared is None and drafts is not None and drafts.forget_cleared(CLEARED_AT_ONCE):
            return Cleared(0, 0)
        return cleared

    def evict(self, n_blocks: int) -> int:
        """Evict up to `n_blocks` of the least recently used prefixes, a bounded number, and
        features of images that nothing needs, and give back their memory as far as that needs no
        copy. Returns how many, 0 if none is left.
        """
        scheduler, evicted = self.scheduler, list[BlockId]()
        store, tree = scheduler.store, scheduler.store.tree
        self._recount.changed()
        if scheduler.images is not None:
            scheduler.images.forget_unneeded()
        while len(evicted) < min(n_blocks, GIVEN_AT_ONCE) and tree is not None:
            if (block := tree.evict()) is None:
                break
            evicted.append(block)
        store.counters.evictions += len(evicted)
        if self._give_back is not None and evicted:
            used = used_ids(op for _, op in store.ops)
            blocks = [block for block in evicted if block not in used]
            self._give_back.release(blocks, [()] * len(store.groups))
        return len(evicted)

    def give_back(self, first: int) -> int | None:
        """Give memory of the storage back, of a bounded number of free blocks and slots, from the
        one at place `first` on. Returns the place to go on at; None: nothing is left to do.
        """
        if self._give_back is None:
            return None
        store, end = self.scheduler.store, first + GIVEN_AT_ONCE
        store.pool.sort_free()
        used = used_ids(op for _, op in store.ops)  # an op may read a block that is free by now
        blocks = [block for block in store.pool.free_blocks() if block not in used]
        slots = [
            [slot for slot in group.slots.free_slots() if slot not in used]
            for group in store.groups
        ]
        if not first:
            self._give_back.shrink(blocks)
        self._give_back.release(blocks[first:end], [each[first:end] for each in slots])
        return end if end < max([len(blocks), *map(len, slots)]) else None

    @property
    def namespaces(self) -> frozenset[Namespace]:
        """All namespaces that can be cleared, except salted ones that are only on disk."""
        scheduler = self.scheduler
        disk, tree, drafts = scheduler.disk, scheduler.store.tree, scheduler.drafts
        found = frozenset[Namespace]() if disk is None else disk.namespaces
        return found.union(
            () if tree is None else tree.roots,
            () if drafts is None else drafts.namespaces,
            [scheduler.namespaces.unsalted],
        )

    def clear_named(
        self, name: str, others: Collection[Namespace], tiers: Collection[CacheTier]
    ) -> None:
        """Clear the namespace with this id, if there is one, in memory or on disk. None of `others`
        has this id.

        It is looked up and cleared in one turn, since it may be loaded from disk between two turns.
        """
        namespace = find_namespace(name, self.namespaces.difference(others))
        if namespace is not None:
            self.clear(namespace, tiers)
            return
        disk = self.scheduler.disk
        if disk is not None and CacheTier.DISK in tiers:
            salted = disk.roots() - {root_digest(self.scheduler.namespaces.unsalted)}
            if (root := find_root(name, salted)) is not None:
                disk.clear_root(root)

    def when_idle(self) -> Future[None]:
        """Return a future that is done once no sequence is live, or the loop has ended."""
        self._idle_waiters.append(Future())
        return self._idle_waiters[-1]

    def stop(self) -> None:
        """End the loop after this turn."""
        self._stopping = True

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to compute, and no step in flight."""
        return self.in_flight is None and not self.scheduler.has_work

    def run(self) -> None:
        """Take turns until stopped. Raises only errors of the loop itself."""
        disk = self.scheduler.disk
        try:
            while not self._stopping:
                self.turn()
            if disk is not None:  # write what is dirty, as far as there is time
                disk.end()
                while disk.is_ending:
                    self.turn()
        finally:
            self._notify_idle()  # or callers would wait for a loop that has ended
            if disk is not None:
                disk.close()
            if self._grammar is not None:
                self._grammar.close()
            if self.kv_events is not None:
                self.kv_events.close()

    def turn(self) -> None:
        """Run the calls that have arrived, then compute one step if there is one."""
        has_rested = self.is_idle
        if has_rested:
            self._recount.rest(self._disk_wait_seconds())
            self.metrics.contradictions = self._recount.n_problems
            if self._rest is not None:
                self._rest()
        elif self.waits_for_disk:
            self._inbox.wait(self._disk_wait_seconds())
        self._inbox.handle()
        if not self.is_idle:
            has_rested = False
            self.step_started_seconds = self.metrics.now()
            self._step()
            self.step_started_seconds = None
        if self.kv_events is not None:
            self.kv_events.publish()
        if self.is_idle:
            if not has_rested:
                self._recount.changed()
                if self._rest is not None:
                    self._rest()
            self._notify_idle()

    def _step(self) -> None:
        """Plan and submit a step, and collect the previous one. A step with drafts is collected
        before the next is planned: only then are the tokens of its sequences known.
        """
        scheduler, before = self.scheduler, self.in_flight
        follows = before is not None  # the device goes from the previous step to the next
        if before is not None and (before.comes_alone or scheduler.prefers_sync):
            # While the device waits for the plan, the next step's time runs.
            follows, before = self._collect(before), None
        planned = scheduler.plan()
        grammar = self._needed_grammar()
        if grammar is not None:
            grammar.ask(planned)
        if not follows:
            self._device_free_seconds, self._loading_steps = self.metrics.now(), []
        step = None if planned is None else self._submit(planned)
        self._deliver_events()
        if before is not None and not self._collect(before, step):
            step = None
        if before is None and step is None and grammar is not None:
            grammar.rest()
        self._deliver_events()
        self.in_flight = step
        if step is not None:
            self._sample(step)
            self._deliver_events()
        disk, unanswered = scheduler.disk, scheduler.sequences.unanswered
        self.waits_for_disk = (
            planned is None and disk is not None and disk.is_loading and not unanswered
        )

    def _submit(self, step: Step) -> Step | None:
        """Submit a step. Returns it, or None if it fails."""
        if step.is_loading:  # while the previous step has the device
            self._loading_steps.append(step.plan.number)
        try:
            self._runner.submit(step.plan)
        except Exception as error:
            # At once: a sequence that ends with the previous step must not count on this one.
            self._fail(error, step)
            return None
        return step

    def _collect(self, step: Step, after: Step | None = None) -> bool:
        """Collect a step and commit it. The next step has the device from then on. If the step
        fails, so does the step `after` it. Returns whether the step was computed.
        """
        try:
            result = self._runner.collect()
        except Exception as error:
            self._fail(error, step, after)
            return False
        now = self.metrics.now()
        seconds, self._device_free_seconds = now - self._device_free_seconds, now
        self.metrics.step_seconds.observe(seconds)
        loading_steps, self._loading_steps = self._loading_steps, []
        waited_seconds = 0.0
        if self._grammar is not None:
            waited_seconds, self._grammar.waited_seconds = self._grammar.waited_seconds, 0.0
        self._step_seconds = max(seconds - waited_seconds, 0.0)
        if self._step_seconds > waited_seconds:  # otherwise waiting hides the model's time
            self.scheduler.observe(step, loading_steps, seconds)
        self.scheduler.commit(step, result)
        if (grammar := self._needed_grammar()) is not None:
            grammar.after_commit(self._step_seconds)
        return True

    def _sample(self, step: Step) -> None:
        """Have the rest of the step computed and its tokens sampled."""
        grammar = self._needed_grammar()
        try:
            self._runner.launch()
            masks = NO_STEP_MASKS
            if grammar is not None:  # while the device computes
                masks = grammar.masks(step, self._step_seconds)
            self._runner.draw(masks)
        except Exception as error:
            self.in_flight = None
            self._fail(error, step)

    def _fail(self, error: Exception, *steps: Step | None) -> None:
        """End the sequences of these steps after an error of the runner, or have them computed
        again where that may help. Raises RunnerLost.
        """
        if isinstance(error, RunnerLost):
            raise error
        logger.exception("a step failed")
        for step in steps:
            if step is None:
                continue
            if isinstance(error, StepLost):
                self.scheduler.failed_steps.recompute(step, error.not_encoded)
            else:
                message = f"the step failed: {type(error).__name__}: {error}"
                self.scheduler.failed_steps.fail(step, message)
        if isinstance(error, StorageLost):
            self._lose_storage()

    def _lose_storage(self) -> None:
        """Have all running sequences computed again, and forget all that is cached in memory."""
        logger.warning(
            "the KV cache in memory is lost, %d pinned blocks with it: all that runs is computed "
            "again",
            self.scheduler.pins.n_blocks,
        )
        self.scheduler.failed_steps.recompute_all()
        self._clear_blocks(None)
        while self.scheduler.store.forget_cleared() is not None:
            pass

    def _needed_grammar(self) -> GrammarStage | None:
        """The grammar stage while any sequence has a grammar."""
        return self._grammar if self.scheduler.sequences.n_guided else None

    def _disk_wait_seconds(self) -> float | None:
        """How long the loop may sleep: None means until there is a call."""
        disk = self.scheduler.disk
        return None if disk is None else disk.wait_seconds()

    def _notify_idle(self) -> None:
        waiters, self._idle_waiters = self._idle_waiters, []
        for idle in waiters:
            if idle.set_running_or_notify_cancel():
                idle.set_result(None)

    def _deliver_events(self) -> None:
        if events := self.scheduler.take_events():
            self._deliver(events)
