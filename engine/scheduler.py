"""Decides what each step computes, and takes in what it has computed.

    add / abort ─► plan() ─► StepPlan ─► (runner) ─► StepResult ─► commit() ─► OutputEvents

A machine without a clock, threads or tensors. The next step may be planned before the one before is
committed. Running sequences come first, those that lack a single token before those with more, so a
long prompt is computed in chunks beside the others' decodes.
"""

from bisect import insort
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import count

from engine import events, policy
from engine.admission import Admission, AdmissionCounters
from engine.api import InvalidRequest
from engine.costs import StepCosts
from engine.disk_cache.cache import NO_DISK_CACHE, DiskCache
from engine.disk_cache.recalls import Prompt, Recalled, Wish
from engine.draft import Draft
from engine.output import OutputFactory
from engine.sequence import LiveSequence, Status, lease_of
from engine.step import SampledToken, SequenceId, StepPlan, StepResult
from engine.step_budget import StepBudget
from engine.submission import Submission
from engine.types import FinishReason, OutputEvent, Request
from engine.validation import Limits
from kvstore.digest import Digest
from kvstore.lease import Lease, Refusal
from kvstore.store import KVStore
from kvstore.types import DEFAULT_NAMESPACE, Namespace


@dataclass(slots=True)
class SchedulerCounters:
    """Counted since start; they only grow."""

    computed_prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    rows_sat_out: int = 0  # a step each


class Scheduler:
    """Continuous batching over one KVStore. Requests without a salt share one namespace."""

    def __init__(
        self,
        store: KVStore,
        outputs: OutputFactory,
        limits: Limits,
        draw_seed: Callable[[], int],
        unsalted: Namespace = DEFAULT_NAMESPACE,
        disk: DiskCache = NO_DISK_CACHE,
    ) -> None:
        self._store = store
        self._disk = disk
        self._admission = Admission(store, limits, self._recall)
        self._outputs = outputs
        self._limits = limits
        self._draw_seed = draw_seed
        self._unsalted = unsalted
        self._costs = StepCosts()
        self._ids = count()
        self._numbers = count(1)  # of steps
        self._running: list[LiveSequence] = []
        self._requests: dict[str, list[LiveSequence]] = {}
        self._live: dict[SequenceId, LiveSequence] = {}
        self._admissions: list[OutputEvent] = []
        self._leaving: list[SequenceId] = []  # what the runner has not been told yet
        self._guided: dict[SequenceId, LiveSequence] = {}  # whose matchers are unanswered
        self.counters = SchedulerCounters()

    @property
    def store(self) -> KVStore:
        return self._store

    @property
    def disk(self) -> DiskCache:
        return self._disk

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
        return bool(self._live) or self._disk.is_busy

    def sequence(self, sequence_id: SequenceId) -> LiveSequence | None:
        """None when it is over."""
        return self._live.get(sequence_id)

    def is_loading(self, sequence: LiveSequence) -> bool:
        """Whether it waits for what comes from disk."""
        lease = self._admission.awaited(sequence) if self._disk.is_loading else None
        return lease is not None and self._disk.loads(lease)

    @property
    def unanswered(self) -> tuple[LiveSequence, ...]:
        """Those whose guides' matchers have to be answered before they go on."""
        return tuple(self._guided.values())

    def take_admissions(self) -> list[OutputEvent]:
        """News of those who were admitted for the first time since this was last asked."""
        news, self._admissions = self._admissions, []
        return news

    def namespace(self, cache_salt: str) -> Namespace:
        return replace(self._unsalted, cache_salt=cache_salt)

    def names(self, request: Request) -> tuple[Digest, ...]:
        """What its prompt's blocks are called where they may be on disk. On any thread."""
        return self._disk.names(self.namespace(request.cache_salt), request.prompt)

    def add(self, submission: Submission) -> None:
        """Queue the request's n sequences.

        Raises InvalidRequest or NoRoom.
        """
        request = submission.request
        if request.id in self._requests:
            raise InvalidRequest(f"a request with id {request.id} is being served", "id")
        self._admission.waiting.check_room(request.client, request.n)
        seed = request.sampling.seed
        base_seed = self._draw_seed() if seed is None else seed
        first: LiveSequence | None = None
        self._requests[request.id] = []
        for index in range(request.n):
            sequence = self._new_sequence(submission, index, base_seed + index, first)
            first = first or sequence
            self._requests[request.id].append(sequence)
            self._live[sequence.id] = sequence
            self._admission.add(sequence)

    def abort(self, request_id: str) -> list[OutputEvent]:
        """End what is left of a request. What it has computed stays in the cache.

        So does what is being computed: a sequence in flight ends when its step is committed.
        """
        sequences = tuple(self._requests.get(request_id, ()))
        for sequence in sequences:
            sequence.is_aborted = True
        return [self._end(s, FinishReason.ABORT) for s in sequences if not s.is_in_flight]

    def plan(self) -> StepPlan:
        """The next step. Takes the blocks for it, preempting where there are too few."""
        time = StepBudget(self._costs, self._limits.step_seconds)
        draft = Draft(self._limits.step_tokens, time, next(self._numbers))
        preemptions = self.counters.preemptions
        self._schedule_running(draft)
        if self.counters.preemptions == preemptions:  # else who gave way would be back at once
            self._schedule_waiting(draft)
        # Last: none is written behind its reading.
        draft.reads += self._disk.reads(draft.number, time.moving_seconds)
        if draft.is_empty:
            return StepPlan()
        draft.before += self._store.take_orders()
        leaving, self._leaving = self._leaving, []
        return draft.plan(leaving)

    def took(self, plan: StepPlan, filled: Collection[int], seconds: float) -> None:
        """The step has taken so long, and `filled` were filled in meanwhile, by their numbers: the
        next ones are planned accordingly.
        """
        is_scoring = any(chunk.prompt_logprobs is not None for chunk in plan.chunks)
        if filled or plan.reads:
            if not plan.chunks:  # they are predicted less well than bytes could tell
                extra_seconds = seconds - self._costs.seconds(plan.work)
                self._disk.took(filled, plan.number, max(extra_seconds, 0.0))
        elif plan.work.forwards and not is_scoring:
            self._costs.observe(plan.work, seconds)

    def settle(self) -> list[OutputEvent]:
        """What is new of those whose matchers have been answered meanwhile."""
        news = []
        for sequence in self.unanswered:
            if sequence.unanswered is None:
                del self._guided[sequence.id]
                news += self._settled(sequence)
        return news

    def commit(self, plan: StepPlan, result: StepResult) -> list[OutputEvent]:
        """The step has been computed: publish its blocks, append its tokens, say what is new."""
        self.counters.steps += 1
        self._disk.commit(plan.number, result.read)
        news = []
        for sequence, n_tokens in self._still_running(plan):
            if message := result.failed.get(sequence.id):
                news.append(self._fail(sequence, message))
                continue
            self._progress(sequence, n_tokens)
            if scores := result.scored.get(sequence.id):
                sequence.prompt_scores += scores
            sampled = result.sampled.get(sequence.id)
            if sequence.is_aborted:
                news.append(self._end(sequence, FinishReason.ABORT))
            elif sampled is not None:
                news += self._append(sequence, sampled)
            elif sequence.is_computed:
                news.append(self._end(sequence, FinishReason.LENGTH))
        return news

    def fail(self, plan: StepPlan, message: str) -> list[OutputEvent]:
        """The step has raised: its sequences end, and nothing of it is published."""
        self._store.revoke(plan.before)
        self._disk.fail(plan.number)
        return [self._fail(sequence, message) for sequence, _ in self._still_running(plan)]

    def _still_running(self, plan: StepPlan) -> Iterator[tuple[LiveSequence, int]]:
        """Those of the step's sequences that run, and how many tokens it has computed of them.

        Others have ended or given way since the step was planned. Who gave way draws again what it
        has drawn here.
        """
        for sequence_id, n_tokens in plan.rows():
            sequence = self._live.get(sequence_id)
            if sequence is not None and sequence.status is Status.RUNNING:
                yield sequence, n_tokens

    def _new_sequence(
        self, submission: Submission, index: int, seed: int, first: LiveSequence | None
    ) -> LiveSequence:
        request = submission.request
        return LiveSequence(
            id=SequenceId(next(self._ids)),
            index=index,
            request=request,
            namespace=self.namespace(request.cache_salt),
            tokens=submission.prompts[index],
            output=self._outputs.new(request),
            seed=seed,
            stop_token_ids=self._outputs.stop_token_ids(request),
            guide=submission.guides[index],
            names=submission.names,
            first=first,
        )

    def _schedule_running(self, draft: Draft) -> None:
        lacking = [(sequence, sequence.remaining_tokens) for sequence in self._running]
        decodes = [each for each in lacking if each[1] == 1]
        prompts = [each for each in lacking if each[1] > 1]
        for sequence in self._running:
            if sequence.keeps_logits:
                draft.keep(sequence)
                self.counters.rows_sat_out += 1
        self._schedule_rows(decodes, draft)  # Limits leave each a token
        self._fill_in(draft)
        self._schedule_rows(prompts, draft)

    def _schedule_rows(self, lacking: Iterable[tuple[LiveSequence, int]], draft: Draft) -> None:
        for sequence, n_tokens in lacking:
            if draft.budget_tokens == 0:
                return
            if sequence.status is Status.RUNNING:  # not preempted by one before it
                n_allowed = draft.allow(sequence, n_tokens)
                if n_allowed:
                    self._schedule(sequence, n_allowed, draft)

    def _fill_in(self, draft: Draft) -> None:
        """What has come from disk, as much as there is time for beside the decodes."""
        if fills := self._disk.fills(draft.number, draft.time.moving_seconds):
            draft.before += [*self._store.take_orders(), *fills]
            draft.time.move(self._disk.fill_seconds(draft.number))

    def _schedule_waiting(self, draft: Draft) -> None:
        admitted = self._admission.admit(len(self._running))
        while draft.has_room and (sequence := next(admitted, None)) is not None:
            if sequence.admissions == 1:
                self._admissions.append(events.admission(sequence))
            insort(self._running, sequence, key=policy.admission_key)
            self._must_be_answered(sequence)
            n_tokens = max(draft.allow(sequence, sequence.remaining_tokens), 1)
            self._schedule(sequence, n_tokens, draft)  # now, for its orders are in this step

    def _schedule(self, sequence: LiveSequence, n_tokens: int, draft: Draft) -> None:
        """Put as much of the sequence into the step as the budget allows."""
        lease = lease_of(sequence)
        start = lease.planned_tokens
        if n_tokens > 1:
            n_tokens = self._store.stride(lease, n_tokens, sequence.split)
        while isinstance(room := self._store.extend(lease, n_tokens, sequence.split), Refusal):
            candidates = [
                s for s in self._running if s.id not in draft.sequence_ids and not s.is_aborted
            ]
            victim = policy.victim(candidates)
            self._preempt(victim)
            if victim is sequence:
                return
        draft.add(sequence, start, n_tokens, room)

    def _recall(self, sequence: LiveSequence, wish: Wish) -> bool:
        prompt = Prompt(sequence.namespace, sequence.tokens, sequence.names)
        found = self._disk.recall(prompt, wish, len(self._running), self._costs.prompt_seconds)
        return found is not Recalled.PUT_OFF

    def _preempt(self, sequence: LiveSequence) -> None:
        """Its blocks go to the cache, where it will find most of them when it comes back."""
        self._leave_batch(sequence)
        self._store.donate(sequence.preempt())
        self._running.remove(sequence)
        self._admission.add(sequence)
        self.counters.preemptions += 1

    def _leave_batch(self, sequence: LiveSequence) -> None:
        if sequence.is_in_batch:
            self._leaving.append(sequence.id)

    def _progress(self, sequence: LiveSequence, n_tokens: int) -> None:
        lease = lease_of(sequence)
        start = lease.written_tokens
        self._store.publish(lease, start + n_tokens)
        if start < sequence.prompt_tokens:
            computed = min(start + n_tokens, sequence.prompt_tokens) - start
            self.counters.computed_prompt_tokens += computed

    def _append(self, sequence: LiveSequence, sampled: SampledToken) -> list[OutputEvent]:
        sequence.take(sampled)
        self.counters.generated_tokens += 1
        if self._must_be_answered(sequence):
            return []
        return self._settled(sequence)

    def _must_be_answered(self, sequence: LiveSequence) -> bool:
        if sequence.unanswered is None:
            return False
        self._guided[sequence.id] = sequence
        return True

    def _settled(self, sequence: LiveSequence) -> list[OutputEvent]:
        """Its guide knows what may follow: the last token is read, if there is one."""
        if (failed := sequence.failed) is not None:
            self._retire(sequence)
            return [events.refusal(sequence, failed)]
        sampled = sequence.unread
        if sampled is None:
            return []
        delta = sequence.read(sampled)
        if delta.finish_reason:
            self._retire(sequence)
        return [events.token(sequence, sampled, delta)]

    def _end(self, sequence: LiveSequence, reason: FinishReason) -> OutputEvent:
        """The sequence ends without another token."""
        self._retire(sequence)
        return events.end(sequence, reason)

    def _fail(self, sequence: LiveSequence, message: str) -> OutputEvent:
        """Its blocks may hold anything: they are let go, not donated."""
        lease = lease_of(sequence)
        self._leave(sequence)
        self._store.release(lease)
        return events.failure(sequence, message)

    def _retire(self, sequence: LiveSequence) -> None:
        lease = self._leave(sequence)
        if lease is not None:
            self._store.donate(lease)

    def _leave(self, sequence: LiveSequence) -> Lease | None:
        """Out of every list; hands over the lease, if there is one."""
        self._leave_batch(sequence)
        if sequence.status is Status.RUNNING:
            self._running.remove(sequence)
        else:
            self._admission.withdraw(sequence)
        del self._live[sequence.id]
        self._guided.pop(sequence.id, None)
        siblings = self._requests[sequence.request.id]
        siblings.remove(sequence)
        if not siblings:
            del self._requests[sequence.request.id]
        return sequence.finish()
