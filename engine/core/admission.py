"""Decides which waiting sequence is admitted next, and gets its blocks from the store."""

from collections.abc import Container, Sequence, Set
from itertools import takewhile

from engine.core.budget import StepCosts
from engine.core.preemption import ClientUsage
from engine.core.queue import WaitingQueue
from engine.core.sequence import LiveSequence, LiveSequences
from engine.core.step import Limits
from engine.disk_cache.cache import DiskCache
from engine.disk_cache.loader import LoadAttempt, LoadOutcome, Prompt
from engine.values.request import WaitReason
from kvstore.in_flight import QueuedPrompt
from kvstore.lease import Lease, Refusal
from kvstore.store import KVStore


class Admission:
    """Admits the sequences of a waiting queue, each with a lease, to `running`.

    If several clients find too few blocks, the one that holds least goes first; among equals, the
    one whose turn is first. No client that holds as much overtakes it, or a long prompt might
    starve. `refused` has each client's next sequence, if the store had too few blocks for it.

    A sequence whose prompt has raised where it was looked up is not admitted. It is in `failures`
    with the error, until the scheduler ends it.
    """

    def __init__(
        self,
        store: KVStore,
        limits: Limits,
        sequences: LiveSequences,
        costs: StepCosts,
        disk: DiskCache | None,
    ) -> None:
        self._store = store
        self._sequences = sequences
        self._running: Sequence[LiveSequence] = sequences.running
        self._costs = costs
        self._disk = disk
        self._max_running = limits.max_running
        self._reserved_for: str | None = None  # the client for which a slot was freed by preemption
        self.refused: dict[str, LiveSequence] = {}
        self.failures: dict[LiveSequence, BaseException] = {}
        self.waiting = WaitingQueue(limits.max_waiting)

    def add(self, sequence: LiveSequence) -> None:
        """Queue a sequence that is new or has been preempted. A running sequence that computes the
        same prefix will save its state where this one resumes.
        """
        self.waiting.add(sequence)
        try:
            prompt = sequence.queued_prompt = _queued_prompt(sequence)
            if prompt is not None:
                self._must_wait(prompt)
        except BaseException as error:
            self.failures[sequence] = error

    def has_slot(self, client: str | None = None) -> bool:
        """Whether a slot is free. With `client`, one reserved for another client does not count."""
        is_kept = client is not None and self._reserved_for not in {None, client}
        return len(self._running) + is_kept < self._max_running

    def admit(self, client: str) -> tuple[LiveSequence, Lease] | None:
        """Admit the client's next sequence, if there is room and no other client goes first."""
        if not self.has_slot(client):
            return None
        if client == self._reserved_for:
            self._reserved_for = None
        sequence = self._next(client)
        if sequence is None or not self._may_try(sequence):
            return None
        lease = self._lease(sequence)
        if isinstance(lease, Refusal):
            self.refused[client] = sequence
            sequence.refused_at_releases = self._store.pool.n_releases
            return None
        self.withdraw(sequence)
        if self._store.in_flight is not None:  # before steps are planned for the lease
            queued = (each.queued_prompt for each in self.waiting)
            self._store.in_flight.compare(lease, filter(None, queued))
        return sequence, lease

    def victim(self, prompts: Container[str]) -> LiveSequence | None:
        """The sequence to preempt now for another client's next sequence, which finds no room.

        A freed slot goes to the first client in turn that runs less than the victim's client. It is
        freed only if no client whose prompt is prefilled (`prompts`) has its turn before.
        """
        if not self.waiting or len(self.waiting.clients) == 1:
            return None
        if self.refused:
            usage = self._tokens_held()
            client = self._first_of(self.refused.keys(), usage)
            sequence = self._next(client)
            if sequence is not None and client in self.refused:
                victim = usage.victim(client, len(sequence.tokens))
                if victim is not None:
                    return victim
        if self.has_slot():
            return None
        usage = ClientUsage(self._running, lambda sequence: 1)
        for client in takewhile(lambda client: client not in prompts, self.waiting.clients):
            victim = usage.victim(client, 1) if client in self.waiting else None
            sequence = None if victim is None else self._next(client)
            if sequence is not None and self._may_try(sequence):
                self._reserved_for = client
                return victim
        return None

    def defer_background(self) -> None:
        """Forget which background sequences were refused, and the slot that is reserved for one:
        they are not due while others are live, and nobody waits for them.
        """
        for client, sequence in list(self.refused.items()):
            if sequence.request.is_background:
                del self.refused[client]
        if self._reserved_for is not None and self._next(self._reserved_for) is None:
            self._reserved_for = None

    def withdraw(self, sequence: LiveSequence) -> None:
        """Take a sequence out of the queue."""
        client = sequence.request.client
        self.waiting.remove(sequence)
        if self.refused.get(client) is sequence:
            del self.refused[client]
        if client == self._reserved_for and client not in self.waiting:
            self._reserved_for = None
        sequence.queued_prompt = None
        sequence.load_attempt = LoadAttempt()

    def wait_reason(self, sequence: LiveSequence) -> WaitReason:
        """Why the sequence waits: the reason for which `admit` last did not admit it.

        While a client waits for blocks, so do the later sequences in its queue, and clients that
        hold more.
        """
        in_flight, prompt = self._store.in_flight, sequence.queued_prompt
        awaited = None if in_flight is None or prompt is None else in_flight.awaited(prompt)
        if awaited is not None and self._disk is not None and self._disk.is_filling(awaited):
            return WaitReason.DISK
        if awaited is not None or _waits_for_first(sequence):
            return WaitReason.TWIN
        if not self.has_slot(sequence.request.client):
            return WaitReason.SLOTS
        if sequence.load_attempt.is_deferred:
            return WaitReason.DISK
        return WaitReason.MEMORY if self.refused else WaitReason.TURN

    def _may_start(self, sequence: LiveSequence) -> bool:
        """Whether to admit the sequence, as far as its own state and its prompt say."""
        if sequence in self.failures:
            return False
        try:
            return self._is_due(sequence)
        except BaseException as error:
            self.failures[sequence] = error
            return False

    def _is_due(self, sequence: LiveSequence) -> bool:
        """Whether the sequence has something to compute that no running lease will provide. In the
        background one prompt is computed at a time, and only while no other sequence is live.
        """
        live = self._sequences
        if sequence.request.is_background and (live.n_foreground or live.prefilling):
            return False
        awaits_last_check = sequence.pending_token is not None and not sequence.max_new_tokens_left
        if _waits_for_first(sequence) or awaits_last_check:
            return False
        prompt = sequence.queued_prompt = _queued_prompt(sequence)
        if prompt is None:
            return True
        if self._must_wait(prompt):
            return False
        if self._disk is None:
            return True
        outcome = self._disk.load(
            Prompt(sequence.namespace, sequence.tokens, sequence.block_hashes),
            sequence.load_attempt,
            len(self._running),
            self._costs.prompt_seconds,
        )
        sequence.load_attempt.is_deferred = outcome is LoadOutcome.DEFERRED
        return outcome is not LoadOutcome.DEFERRED and not self._must_wait(prompt)

    def _must_wait(self, prompt: QueuedPrompt) -> bool:
        """Whether a running request is about to compute more of the prompt than is cached."""
        return self._store.in_flight is not None and self._store.in_flight.must_wait(prompt)

    def _next(self, client: str) -> LiveSequence | None:
        """The client's first sequence that may start."""
        sequence = self.waiting.next(client, self._may_start)
        if self.refused.get(client) is not sequence:
            self.refused.pop(client, None)
        return sequence

    def _may_try(self, sequence: LiveSequence) -> bool:
        """Whether blocks may be requested for the sequence.

        Not if no block has been freed since it was refused, and not if another refused client holds
        less, or holds as much and has its turn before.
        """
        if not self.refused:
            return True
        client = sequence.request.client
        n_releases = self._store.pool.n_releases
        if client in self.refused and sequence.refused_at_releases == n_releases:
            return False
        return client == self._first_of({client, *self.refused}, self._tokens_held())

    def _tokens_held(self) -> ClientUsage:
        """How many tokens each client holds."""
        return ClientUsage(self._running, lambda sequence: len(sequence.tokens))

    def _first_of(self, clients: Set[str], usage: ClientUsage) -> str:
        """The client that holds least. If several do, the one whose turn is first."""
        return min(filter(clients.__contains__, self.waiting.clients), key=usage.held.__getitem__)

    def _lease(self, sequence: LiveSequence) -> Lease | Refusal:
        """Request blocks for the sequence, leaving one for each running sequence's next decode."""
        tokens, spare_blocks = sequence.tokens, len(self._running)
        reserve_tokens = int(sequence.max_new_tokens_left > 1)  # the last token's KV is not needed
        if (forkable := _forkable(sequence)) is not None:
            n_tokens = sequence.prompt_tokens - 1
            return self._store.fork(forkable, tokens, n_tokens, reserve_tokens, spare_blocks)
        lease = self._store.admit(
            sequence.namespace,
            tokens,
            reserve_tokens,
            spare_blocks,
            sequence.shared_tokens,
            adopts=sequence.can_use_prefix_cache,
        )
        if isinstance(lease, Lease):
            for image in sequence.request.images:  # another may come instead, or other text
                lease.checkpoint(image.start)
                lease.checkpoint(image.stop)
        return lease


def _waits_for_first(sequence: LiveSequence) -> bool:
    """Whether the first sequence of its request has yet to compute their prompt."""
    first = sequence.first
    return first is not None and first.is_live and first.output_tokens == 0


def _forkable(sequence: LiveSequence) -> Lease | None:
    """The lease of the request's first sequence, if it has computed their prompt and this sequence
    can use that.
    """
    first = sequence.first
    if first is None or sequence.admissions or not sequence.can_use_prefix_cache:
        return None
    return first.lease if first.computed_tokens >= sequence.prompt_tokens else None


def _queued_prompt(sequence: LiveSequence) -> QueuedPrompt | None:
    """The prompt that is compared with the prefixes in flight. None if the sequence does not look
    for its prompt in the prefix cache: the request's first sequence computes it.
    """
    uses_cache = sequence.can_use_prefix_cache and not _waits_for_first(sequence)
    if not uses_cache or _forkable(sequence) is not None:
        return None
    return sequence.queued_prompt or QueuedPrompt(sequence.namespace, sequence.tokens)
