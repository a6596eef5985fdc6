"""Decides what each step computes.

    add / abort ─► plan() ─► Step ─► (runner) ─► StepResult ─► commit() ─► take_events()

It has no threads and no tensors, and reads the clock only for its metrics. A step may be planned
before the previous one is committed. Decodes come first, so a long prompt is prefilled in chunks
next to the others' decodes. Clients take turns for the rest of a step: see
docs/internals/scheduler.md.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from itertools import count
from math import ceil
from typing import Final

from engine.api import InvalidRequest, QueueFull
from engine.core.admission import Admission
from engine.core.budget import StepBudget, StepCosts
from engine.core.commit import Commit
from engine.core.drafting import DraftPolicy
from engine.core.failed_steps import FailedSteps
from engine.core.images import ImageFeatures
from engine.core.metrics import Metrics
from engine.core.pins import Pins
from engine.core.preemption import by_rows, preemption_victim
from engine.core.queue import NoRoom
from engine.core.request import Namespaces, PreparedRequest, SequenceFactory
from engine.core.rows import batch_entry, prefill_row
from engine.core.sequence import LiveSequence, LiveSequences, Status, Step
from engine.core.step import Late, Limits, Resample, StepPlan, StepResult
from engine.disk_cache.cache import DiskCache
from engine.grammar.state import GrammarPlan
from engine.output.text import NewOutput
from engine.values.output import FinishReason, OutputEvent
from engine.values.request import Request, WaitReason
from kvstore.lease import Lease
from kvstore.store import KVStore


class Scheduler:
    """Continuous batching over one KVStore. Requests of one adapter, or of none, share a namespace
    unless they have a salt. Without `drafts` nothing is drafted, without `disk` nothing is loaded
    or written.
    """

    def __init__(
        self,
        store: KVStore,
        new_output: NewOutput,
        limits: Limits,
        draw_seed: Callable[[], int],
        metrics: Metrics,
        namespaces: Namespaces | None = None,
        disk: DiskCache | None = None,
        drafts: DraftPolicy | None = None,
    ) -> None:
        self.store: Final = store
        self.disk: Final = disk
        self.namespaces: Final = namespaces or Namespaces()
        self.drafts: Final = drafts
        self.metrics: Final = metrics
        self.sequences: Final = LiveSequences()
        model = None if drafts is None else drafts.model
        self._draft_store = None if model is None else model.store
        self.costs: Final = StepCosts() if model is None else StepCosts(model.cost_share)
        self.images: Final = (
            None if limits.images is None else ImageFeatures(limits.images, store.leases)
        )
        self._admission = Admission(store, limits, self.sequences, self.costs, disk)
        self._new_sequences = SequenceFactory(
            limits, new_output, draw_seed, self.namespaces, disk, drafts
        )
        self._limits = limits
        self.failures: dict[LiveSequence, BaseException] = {}  # of sequences to be ended
        self._numbers = count(1)  # of steps
        self._had_turns = False  # whether clients had turns in the latest step
        self._rowless: list[tuple[LiveSequence, Lease]] = []  # admitted since ops were last taken
        self.pins: Final = Pins(store)
        self._commit = Commit(store, self.sequences, self._admission, metrics, drafts, self.pins)
        self.failed_steps: Final = FailedSteps(
            store, self.sequences, self._admission, self._commit, metrics, disk, drafts, self.images
        )
        self.running: Sequence[LiveSequence] = self.sequences.running
        self.waiting = self._admission.waiting

    @property
    def live(self) -> list[LiveSequence]:
        """The running sequences, then the waiting ones in the order of their turns."""
        return [*self.running, *self.waiting]

    @property
    def has_work(self) -> bool:
        is_releasing = bool(self.store.ended)
        if self._draft_store is not None:
            is_releasing |= bool(self._draft_store.ended)
        return bool(self.sequences) or is_releasing or (self.disk is not None and self.disk.is_busy)

    def wait_reason(self, sequence: LiveSequence) -> WaitReason | None:
        """Why the sequence waits; None if it runs."""
        if sequence.lease is not None:
            return None
        return self._admission.wait_reason(sequence)

    def take_events(self) -> list[OutputEvent]:
        """The events of all sequences since the last call, in order."""
        events, self._commit.events = self._commit.events, []
        return events

    def prepare(self, request: Request, plan: GrammarPlan | None = None) -> PreparedRequest:
        """Check a request, and compute what depends on the lengths of its texts. Raises
        InvalidRequest. On any thread, before `add`. Without a `plan` it has no constraint.
        """
        return self._new_sequences.prepare(request, plan)

    def add(self, prepared: PreparedRequest, arrived_seconds: float = 0.0) -> None:
        """Queue the request's n sequences. Raises InvalidRequest or QueueFull."""
        request = prepared.request
        if self.sequences.of_request(request.id):
            raise InvalidRequest(f"a request with id {request.id} is being served", "id")
        try:
            self.waiting.check_room(request.client, request.n)
        except NoRoom as refusal:
            wait_seconds = self.metrics.seconds_until_left(refusal.departures)
            raise QueueFull(str(refusal), max(ceil(wait_seconds), 1)) from None
        if request.pin:
            namespace = self.namespaces.of(request.cache_salt, request.adapter)
            if (problem := self.pins.problem(namespace, prepared.tokens)) is not None:
                raise InvalidRequest(problem, "pin")
        for sequence in list(self._new_sequences.sequences(prepared)):  # all of them, or none
            sequence.arrived_seconds = arrived_seconds
            self.sequences.add(sequence)
            self._admission.add(sequence)
        if not request.is_background:
            self.metrics.queued(request.n)

    def abort(self, request_id: str) -> None:
        """End a request's sequences, if it has any. Their computed tokens go to the cache.

        A sequence in flight ends when its step is committed, so that its result is kept as well.
        """
        for sequence in self.sequences.of_request(request_id):
            if _is_in_flight(sequence):
                self.sequences.abort(sequence)
            else:
                self._commit.end(sequence, FinishReason.ABORT)

    @property
    def prefers_sync(self) -> bool:
        """Whether drafts of the next step are predicted to gain more than overlapping it with the
        step in flight, which is then collected before the next is planned.
        """
        if self.drafts is None or not self.sequences.has_proposers:
            return False
        return self.drafts.prefers_sync(self.sequences.decoding, self.costs, self._limits)

    def plan(self) -> Step | None:
        """Plan the next step and allocate its blocks. If blocks are short, sequences are preempted;
        if no sequence runs, prefixes are unpinned. Return None if there is nothing to do.
        """
        self._end_failed()
        self.store.begin_step()
        if self._draft_store is not None:
            self._draft_store.begin_step()
        while (step := self._plan()) is None:
            if self.running or not self._admission.refused or not self.pins.drop_oldest():
                return None
        return step

    def _plan(self) -> Step | None:
        limits, n_rows = self._limits, max(self.sequences.n_foreground, len(self.running))
        rows = min(n_rows, limits.max_running)
        budget = StepBudget(self.costs, limits.step_stretch, rows, limits.step_tokens)
        most_tokens = self.sequences.step_tokens(limits.step_tokens)
        step = Step(StepPlan(next(self._numbers)), budget, most_tokens)
        if self._had_turns or self.sequences.has_waiting:
            self.waiting.begin_step()
            self._had_turns = False
        if self.sequences.n_background:
            self._preempt_background(step)
        if self.sequences.has_waiting:
            self._preempt_for_client(step)
        self._add_decodes(step)
        if self.disk is not None:
            step.is_loading = self.disk.add_loads(step.plan.number, step.budget)
        if self.sequences.prefilling or self.sequences.has_waiting:
            self._add_prefills(step)
        if self.drafts is not None and self.sequences.has_proposers:
            self.drafts.add(step, self.costs, self._limits)
        for sequence in step.preempted:  # only now, or this plan could admit it again
            self._admission.add(sequence)
        if self.disk is not None:
            step.is_reading = self.disk.add_reads(step.plan.number, step.budget)
        if not (step.rows or step.plan.encode or step.is_loading or step.is_reading):
            return None
        if self.images is not None:
            step.plan.forget = self.images.take_forgotten()
        step.plan.rows = [planned.row for planned in step.rows]
        step.plan.ops = self.store.take_ops()
        step.rowless, self._rowless = self._rowless, []
        step.plan.leave, self.sequences.leaving = self.sequences.leaving, []
        return step

    def observe(self, step: Step, loading_steps: Collection[int], seconds: float) -> None:
        """Learn from a step that took `seconds`. During that time, the steps numbered
        `loading_steps` filled in blocks from disk.
        """
        shape = step.budget.shape
        if loading_steps or step.is_reading:
            assert self.disk is not None
            if not step.budget.has_prompts:  # whose predictions are off by more than bytes take
                extra_seconds = seconds - self.costs.predict(shape)
                self.disk.observe(loading_steps, step.plan.number, max(extra_seconds, 0.0))
        elif shape.decode_rows or step.budget.has_prompts:
            self.costs.observe(shape, seconds)

    def contain(self, sequence: LiveSequence, error: BaseException) -> None:
        """End a sequence whose code on the host has raised `error`. No other is affected."""
        self._commit.contain(sequence, error)

    def _end_failed(self) -> None:
        """End the sequences whose code has raised while a step was planned. Not before the step is
        submitted, because it may have rows of them.
        """
        failures, self.failures = self.failures | self._admission.failures, {}
        self._admission.failures = {}
        if self.drafts is not None:
            failures |= self.drafts.failures
            self.drafts.failures = {}
        for sequence, error in failures.items():
            self._commit.contain(sequence, error)

    def emit_unblocked(self) -> None:
        """Emit the pending tokens of sequences whose grammar has answered since."""
        self._commit.emit_unblocked()

    def commit(self, step: Step, result: StepResult) -> None:
        """Publish the blocks of a step that was computed, and append its tokens."""
        self._end_failed()
        self.metrics.steps += 1
        if self.disk is not None:
            self.disk.commit(step.plan.number, result.read)
        if self.drafts is not None and self.drafts.model is not None:
            self.drafts.model.commit(step, result)
        if self.images is not None:
            for sequence, why in self.images.commit(step, result):
                if sequence.is_live:
                    self._commit.fail(sequence, why)
        self._commit.step(step.rows, result.rows)

    def _preempt_for_client(self, step: Step) -> None:
        """Preempt at most one sequence of a client that has much for a client that has little."""
        prompts = {sequence.request.client for sequence in self.sequences.prefilling}
        victim = self._admission.victim(prompts)
        if victim is not None:
            self._preempt(victim, step)
            self.metrics.client_preemptions += 1

    def _preempt_background(self, step: Step) -> None:
        """Preempt background sequences while others are live, each after its step in flight."""
        if self.sequences.n_foreground:
            self._admission.defer_background()
            for sequence in [one for one in self.running if one.request.is_background]:
                if sequence.status is Status.RUNNING and not _is_in_flight(sequence):
                    self._preempt(sequence, step)

    def _may_prefill(self, sequence: LiveSequence) -> bool:
        """Whether the step may prefill a running sequence; in the background one step at a time."""
        is_busy = self.sequences.n_foreground or _is_in_flight(sequence)
        return not (sequence.request.is_background and is_busy)

    def _add_decodes(self, step: Step) -> None:
        """Add one token of each sequence that decodes or has one known token left. The limits
        guarantee that all of these fit into a step.
        """
        prefilling = filter(self._may_prefill, self.sequences.prefilling)
        lasts = [one for one in prefilling if one.unplanned_tokens == 1]
        decoding = [*self.sequences.decoding, *lasts]
        if self.sequences.n_background and self.sequences.n_foreground:
            decoding = [one for one in decoding if not one.request.is_background]
        if self.store.available_blocks < len(decoding):  # some may be refused a block
            decoding = by_rows(decoding, self.running)
        n_rows = n_keys = n_listed = 0
        for sequence in decoding:
            lease = sequence.lease
            if lease is None:
                continue  # preempted above
            if sequence in self.sequences.prefilling:
                self._add_prefill(sequence, 1, step)
                continue
            if type(sequence.pending) is Late:
                step.add(sequence, lease, Resample(sequence.id))
                self.metrics.late_rows += 1
                continue
            start = lease.planned_tokens
            if start < sequence.end_tokens and self._reserve(sequence, lease, 1, step):
                step.add(sequence, lease, sequence.decode)
                n_rows += 1
                n_keys += start + 1
                n_listed += sequence.request.sampling.top_logprobs is not None
        if n_rows:
            step.budget_tokens -= n_rows
            step.budget.add_decodes(n_rows, n_keys, n_listed)

    def _add_prefills(self, step: Step) -> None:
        """Add a chunk of each client in turn, and again, as long as there is budget. First come
        prompts that had to be passed over, because what they need does not fit after others.
        """
        prompts = defaultdict[str, deque[LiveSequence]](deque)
        for sequence in self.running:
            if sequence in self.sequences.prefilling and self._may_prefill(sequence):
                prompts[sequence.request.client].append(sequence)
        waiting = self.waiting
        may_begin = bool(waiting) and self._admission.has_slot() and step.has_room
        if not prompts and not may_begin:
            return
        for client, sequence in waiting.take_passed_over():
            if sequence in prompts.get(client, ()) and self._prefill_more(sequence, step):
                prompts[client].remove(sequence)
                waiting.mark_served(client)
                self._had_turns = True
        clients = deque(c for c in waiting.clients if c in prompts or (may_begin and c in waiting))
        held_up = list[str]()  # clients that come after one that waits for blocks
        while clients and step.budget_tokens:
            client = clients.popleft()
            if self._take_turn(client, prompts.get(client, deque()), step):
                waiting.mark_served(client)
                self._had_turns = True
                if not self._admission.refused:
                    clients.extend(held_up)
                    held_up.clear()
                clients.append(client)
            elif self._admission.refused:
                held_up.append(client)

    def _take_turn(self, client: str, prompts: deque[LiveSequence], step: Step) -> bool:
        """Prefill more of one of the client's prompts, or admit one. False if neither can be."""
        while prompts:
            sequence = prompts.popleft()
            if self._prefill_more(sequence, step):
                return True
            self.waiting.pass_over(client, sequence)
        if not step.has_room:
            return False
        admitted = self._admission.admit(client)
        if admitted is None:
            return False
        sequence, lease = admitted
        self.sequences.start(sequence, lease)
        step.begin(lease)
        if sequence.admissions == 1:
            self._commit.admitted(sequence)
        # The admission may have queued copies, which this step carries out.
        self._add_prefill(sequence, max(step.allow(sequence), 1), step)
        if sequence.pending is None:
            self._rowless.append((sequence, lease))
        return True

    def _prefill_more(self, sequence: LiveSequence, step: Step) -> bool:
        """Prefill as much of a running prompt as the step allows. False if nothing can be."""
        n_tokens = 0 if sequence.lease is None else step.allow(sequence)
        return n_tokens > 0 and self._add_prefill(sequence, n_tokens, step)

    def _add_prefill(self, sequence: LiveSequence, n_tokens: int, step: Step) -> bool:
        """Prefill the next `n_tokens` known tokens of the sequence, or fewer, or encode an image
        among them. Return False if neither can be.
        """
        lease = sequence.lease
        assert lease is not None
        start = lease.planned_tokens
        if sequence.unplanned_tokens > 1:
            n_encoded = len(step.plan.encode)
            if self.images is None:
                n_tokens = lease.max_step_tokens(n_tokens, sequence.sampled_position)
            else:
                n_tokens = self.images.chunk_tokens(sequence, lease, n_tokens, step)
            if not n_tokens:
                return len(step.plan.encode) > n_encoded
        try:
            row = prefill_row(sequence, start, n_tokens)
            entry = batch_entry(sequence) if sequence.pending is None else None
        except BaseException as error:
            self.failures[sequence] = error
            return True
        if not self._reserve(sequence, lease, n_tokens, step):
            return True
        if entry is not None:
            step.plan.enter.append(entry)
        step.add(sequence, lease, row)
        if self.images is not None:
            self.images.read(sequence, start, n_tokens, step)
        step.budget_tokens = max(step.budget_tokens - n_tokens, 0)
        is_listed = row.samples and sequence.request.sampling.top_logprobs is not None
        if n_tokens == 1:  # computed with the decodes
            step.budget.add_decodes(1, start + 1, int(is_listed))
        else:
            n_scored = is_listed + (len(row.score.next_tokens) if row.score is not None else 0)
            step.budget.add_chunk(start, n_tokens, n_scored, is_pooled=row.pooling is not None)
        if not sequence.unplanned_tokens:
            self.sequences.planned(sequence)
        return True

    def _reserve(self, sequence: LiveSequence, lease: Lease, n_tokens: int, step: Step) -> bool:
        """Plan the sequence's next positions, preempting others if blocks are short. Return False
        if the sequence itself was preempted.
        """
        position = sequence.sampled_position if n_tokens > 1 else 0
        while self.store.plan(lease, n_tokens, position) is not None:
            in_step, running = {planned.sequence for planned in step.rows}, self.running
            others = [s for s in running if s not in in_step and s.status is Status.RUNNING]
            victim = preemption_victim(others, running)
            self._preempt(victim, step)
            self.metrics.preemptions += 1
            step.is_short_of_blocks = True
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: LiveSequence, step: Step) -> None:
        """Preempt the sequence. Its blocks go to the cache, where it may find them again."""
        if self.drafts is not None:
            self.drafts.leave(sequence)
        self.store.donate(self.sequences.preempt(sequence))
        step.preempted.append(sequence)


def _is_in_flight(sequence: LiveSequence) -> bool:
    """Whether a step that is not committed yet computes for the sequence."""
    return sequence.planned_tokens > sequence.computed_tokens
