"""Decides what each step computes, and takes in what it has computed.

    add / abort ─► plan() ─► StepPlan ─► (runner) ─► StepResult ─► commit() ─► OutputEvents

It has no clock, no threads and no tensors. A step may be planned before the one before it is
committed. Decodes come first, so a long prompt is computed in chunks beside the others' decodes.
The rest of a step goes by the clients' turns (docs/adr/0018).
"""

from bisect import insort
from collections import defaultdict, deque
from collections.abc import Callable, Collection
from itertools import count
from typing import Final

from engine.api import InvalidRequest
from engine.core.budget import StepBudget, StepCosts
from engine.core.commit import Progress, admission_event
from engine.core.metrics import AdmissionCounters, SchedulerCounters
from engine.core.queue import Admission, Turns, admission_key, by_rows, preemption_victim
from engine.core.request import NO_ADAPTERS, Limits, Namespaces, SequenceFactory, Submission
from engine.core.sequence import LiveSequence, LiveSequences, Status, lease_of
from engine.core.step import SequenceId, StepPlan, StepResult
from engine.core.step_builder import StepBuilder
from engine.disk_cache.cache import NO_DISK_CACHE, DiskCache
from engine.disk_cache.loader import LoadAttempt, LoadOutcome, Prompt
from engine.drafts.policy import Drafting
from engine.drafts.proposer import NO_SPECULATOR, Speculator
from engine.output.text import OutputFactory
from engine.values.output import FinishReason, OutputEvent
from engine.values.request import Request, WaitReason
from kvstore.lease import Lease, Refusal
from kvstore.store import KVStore
from kvstore.tokens import Digest


class Scheduler:
    """Continuous batching over one KVStore. Requests of one adapter, or of none, share a namespace
    unless they have a salt.
    """

    def __init__(
        self,
        store: KVStore,
        outputs: OutputFactory,
        limits: Limits,
        draw_seed: Callable[[], int],
        namespaces: Namespaces = NO_ADAPTERS,
        disk: DiskCache = NO_DISK_CACHE,
        speculator: Speculator = NO_SPECULATOR,
    ) -> None:
        self.store: Final = store
        self.disk: Final = disk
        self.namespaces: Final = namespaces
        self.speculator: Final = speculator
        self._turns = Turns()
        self._admission = Admission(store, limits, self._turns, self._start_load)
        self._sequences = SequenceFactory(outputs, draw_seed, namespaces, speculator)
        self._limits = limits
        self._costs = StepCosts()
        self._drafting = Drafting(store, self._costs, limits)
        self._numbers = count(1)  # of steps
        self._running: list[LiveSequence] = []
        self._live = LiveSequences()
        self._admissions: list[OutputEvent] = []
        self._leaving: list[SequenceId] = []  # what the runner has not been told yet
        self.counters = SchedulerCounters()
        self._progress = Progress(store, self._live, self.counters, speculator, self._leave)

    @property
    def running(self) -> tuple[LiveSequence, ...]:
        return tuple(self._running)

    @property
    def waiting(self) -> tuple[LiveSequence, ...]:
        return tuple(self._admission.waiting)

    @property
    def n_running(self) -> int:
        return len(self._running)

    @property
    def n_waiting(self) -> int:
        return len(self._admission.waiting)

    @property
    def admission_counters(self) -> AdmissionCounters:
        return self._admission.counters

    @property
    def has_work(self) -> bool:
        return bool(self._live) or self.disk.is_busy

    def sequence(self, sequence_id: SequenceId) -> LiveSequence | None:
        """None when it is over."""
        return self._live.get(sequence_id)

    def wait_reason(self, sequence: LiveSequence) -> WaitReason | None:
        """Why the sequence does not run; None where it does."""
        if sequence.status is Status.RUNNING:
            return None
        return self._admission.wait_reason(sequence, self.n_running, self.disk.is_filling)

    @property
    def unanswered(self) -> tuple[LiveSequence, ...]:
        """Those whose guides' matchers have to be answered before they go on."""
        return self._live.unanswered

    def take_admissions(self) -> list[OutputEvent]:
        """An event for each sequence that was first admitted since this was last called."""
        news, self._admissions = self._admissions, []
        return news

    def block_hashes(self, request: Request) -> tuple[Digest, ...]:
        """The hashes of its prompt's blocks, where they may be on disk. On any thread."""
        namespace = self.namespaces.of(request.cache_salt, request.adapter)
        return self.disk.block_hashes(namespace, request.prompt)

    def add(self, submission: Submission) -> None:
        """Queue the request's n sequences.

        Raises InvalidRequest or NoRoom.
        """
        request = submission.request
        if self._live.of_request(request.id):
            raise InvalidRequest(f"a request with id {request.id} is being served", "id")
        self._admission.waiting.check_room(request.client, request.n)
        for sequence in self._sequences.sequences(submission):
            self._live.add(sequence)
            self._turns.enter(request.client)
            self._admission.add(sequence)

    def abort(self, request_id: str) -> list[OutputEvent]:
        """End a request's sequences. What they have computed stays in the cache.

        A sequence in flight ends when its step is committed, so that this is kept, too.
        """
        sequences = self._live.of_request(request_id)
        for sequence in sequences:
            sequence.is_aborted = True
        return [self._progress.end(s, FinishReason.ABORT) for s in sequences if not s.is_in_flight]

    @property
    def awaits_tokens(self) -> bool:
        """Whether the step in flight had better be collected before the next one is planned: then
        drafts can go on from its tokens.
        """
        return self._drafting.is_due(self._running)

    def plan(self) -> StepPlan:
        """Plan the next step. Allocates its blocks; preempts sequences where there are too few."""
        batch_rows = min(self.n_running + self.n_waiting, self._limits.max_running)
        time = StepBudget(self._costs, self._limits.step_stretch, batch_rows)
        builder = StepBuilder(self._limits.step_tokens, time, next(self._numbers))
        self._schedule_rows(builder)
        builder.reads += self.disk.reads(builder.number, time.moving_seconds)  # behind all writing
        if builder.is_empty:
            return StepPlan()
        builder.before += self.store.take_ops()
        leaving, self._leaving = self._leaving, []
        return builder.plan(leaving)

    def took(self, plan: StepPlan, filled: Collection[int], seconds: float) -> None:
        """The step has taken so long. Steps numbered `filled` have filled in blocks meanwhile."""
        if filled or plan.reads:
            if not plan.chunks:  # their prediction is off by more than what bytes take
                extra_seconds = seconds - self._costs.seconds(plan.work)
                self.disk.took(filled, plan.number, max(extra_seconds, 0.0))
        elif plan.work.forwards and not plan.is_scoring:
            self._costs.observe(plan.work, seconds)

    def settle(self) -> list[OutputEvent]:
        """The events of sequences whose matchers have been answered meanwhile."""
        return [news for one in self._live.take_answered() for news in self._progress.settled(one)]

    def commit(self, plan: StepPlan, result: StepResult) -> list[OutputEvent]:
        """The step has been computed: publish its blocks, append its tokens. Returns the events."""
        self.counters.steps += 1
        self.disk.commit(plan.number, result.read)
        return [
            news
            for sequence, n_tokens in self._live.running(plan)
            for news in self._progress.take_in(sequence, n_tokens, result)
        ]

    def fail(self, plan: StepPlan, message: str) -> list[OutputEvent]:
        """The step has raised: end its sequences, and publish nothing of it."""
        self.store.revoke(plan.before)
        self.disk.fail(plan.number)
        return [self._progress.fail(sequence, message) for sequence, _ in self._live.running(plan)]

    def _schedule_rows(self, builder: StepBuilder) -> None:
        """Decodes first (limits leave each of them a token), then prompts by turns."""
        prompts, decodes = defaultdict[str, deque[LiveSequence]](deque), list[LiveSequence]()
        for sequence in self._running:
            if (n_tokens := sequence.remaining_tokens) > 1:
                prompts[sequence.request.client].append(sequence)
            elif n_tokens == 1:
                decodes.append(sequence)
        self._turns.begin_step()
        if (victim := self._admission.victim(self._running, prompts)) is not None:
            self._preempt(victim, builder)
            self.counters.client_preemptions += 1
        for sequence in by_rows(decodes, self._running):
            if sequence.status is Status.RUNNING:  # not preempted above
                self._schedule(sequence, 1, builder)
        for sequence in self._running:
            if sequence.keeps_logits:
                builder.keep(sequence)
                self.counters.rows_sat_out += 1
        self._fill_in(builder)
        self._schedule_prompts(prompts, builder)
        self._drafting.widen(builder, self._running)
        for sequence in builder.preempted:  # only now: what is in flight belongs to its old lease
            self._admission.add(sequence)

    def _fill_in(self, builder: StepBuilder) -> None:
        """Fill in what has come from disk, as much as there is time for beside the decodes."""
        if fills := self.disk.fills(builder.number, builder.time.moving_seconds):
            builder.before += [*self.store.take_ops(), *fills]
            builder.time.move(self.disk.fill_seconds(builder.number))

    def _schedule_prompts(
        self, prompts: dict[str, deque[LiveSequence]], builder: StepBuilder
    ) -> None:
        """A chunk of each client in turn, and again, for as long as there is budget."""
        waiting = self._admission.waiting
        may_begin = self._admission.has_slot(len(self._running)) and builder.has_room
        if not prompts and not (may_begin and waiting):
            return
        clients = deque(c for c in self._turns if c in prompts or (may_begin and c in waiting))
        held_up = list[str]()  # while another waits for blocks, who goes first
        while clients and builder.budget_tokens:
            client = clients.popleft()
            if self._take_turn(client, prompts.get(client, deque()), builder):
                self._turns.had(client)
                if not self._admission.is_anyone_refused:
                    clients.extend(held_up)
                    held_up.clear()
                clients.append(client)
            elif self._admission.is_anyone_refused:
                held_up.append(client)

    def _take_turn(self, client: str, prompts: deque[LiveSequence], builder: StepBuilder) -> bool:
        """Go on with one of the client's prompts, else admit one. False where neither can be."""
        while prompts:
            sequence = prompts.popleft()
            has_lease = sequence.status is Status.RUNNING  # not preempted above
            if has_lease and (n_tokens := builder.allow(sequence, sequence.remaining_tokens)):
                self._schedule(sequence, n_tokens, builder)
                return True
        return builder.has_room and self._begin(client, builder)

    def _begin(self, client: str, builder: StepBuilder) -> bool:
        """Admit the client's next sequence and schedule it. False where none can be admitted."""
        sequence = self._admission.admit(client, self._running)
        if sequence is None:
            return False
        if sequence.admissions == 1:
            self._admissions.append(admission_event(sequence))
        insort(self._running, sequence, key=admission_key)
        self._live.must_be_answered(sequence)
        n_tokens = max(builder.allow(sequence, sequence.remaining_tokens), 1)
        self._schedule(sequence, n_tokens, builder)  # at once: its ops are in this step
        return True

    def _schedule(self, sequence: LiveSequence, n_tokens: int, builder: StepBuilder) -> None:
        """Put so many tokens of the sequence into the step. Preempts where blocks are short."""
        lease = lease_of(sequence)
        start, last = lease.planned_tokens, sequence.last_position
        if n_tokens > 1:
            n_tokens = self.store.max_step_tokens(lease, n_tokens, last)
        while isinstance(step_ops := self.store.extend(lease, n_tokens, last), Refusal):
            candidates = [
                s for s in self._running if s.id not in builder.sequence_ids and not s.is_aborted
            ]
            victim = preemption_victim(candidates, self._running)
            self._preempt(victim, builder)
            self.counters.preemptions += 1
            builder.is_short_of_blocks = True
            if victim is sequence:
                return
        builder.add(sequence, start, n_tokens, step_ops)

    def _start_load(self, sequence: LiveSequence, attempt: LoadAttempt) -> bool:
        prompt = Prompt(sequence.namespace, sequence.tokens, sequence.block_hashes)
        found = self.disk.load(prompt, attempt, len(self._running), self._costs.prompt_seconds)
        return found is not LoadOutcome.PUT_OFF

    def _preempt(self, sequence: LiveSequence, builder: StepBuilder) -> None:
        """Take its lease. Its blocks go to the cache, where it finds most of them again later."""
        if sequence.is_in_batch:
            self._leaving.append(sequence.id)
        self.store.donate(sequence.preempt())
        self._running.remove(sequence)
        builder.preempted.append(sequence)

    def _leave(self, sequence: LiveSequence) -> Lease | None:
        """Remove the sequence from everywhere. Returns its lease, if it has one."""
        if sequence.is_in_batch:
            self._leaving.append(sequence.id)
        if sequence.status is Status.RUNNING:
            self._running.remove(sequence)
        else:
            self._admission.withdraw(sequence)
        self._live.remove(sequence)
        self._turns.leave(sequence.request.client)
        return sequence.finish()
