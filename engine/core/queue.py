"""Decides which waiting sequence is admitted next, and which running one is preempted for it.

Clients take turns: a turn is a chunk of a prompt. Slots and blocks are shared max-min fairly: a
client that holds less than another comes first, and the other's excess can be preempted
(docs/internals/scheduler.md).
"""

from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, KeysView, Sequence, Set
from dataclasses import dataclass, field
from itertools import takewhile, zip_longest
from math import ceil

from engine.core.budget import StepCosts
from engine.core.request import Limits
from engine.core.sequence import LiveSequence, LiveSequences, Status, admission_key
from engine.disk_cache.cache import DiskCache
from engine.disk_cache.loader import LoadAttempt, LoadOutcome, Prompt
from engine.values.request import WaitReason
from kvstore.in_flight import QueuedPrompt
from kvstore.lease import Lease, Refusal
from kvstore.slots import NEVER
from kvstore.store import KVStore


def by_rows(decodes: Sequence[LiveSequence], running: Sequence[LiveSequence]) -> list[LiveSequence]:
    """The order in which decodes get blocks: clients with few running rows first. So if blocks run
    out, a sequence of the client with the most rows is preempted.
    """
    rows = Counter(sequence.request.client for sequence in running)
    return sorted(decodes, key=lambda s: rows[s.request.client])


def preemption_victim(
    candidates: Iterable[LiveSequence], running: Sequence[LiveSequence]
) -> LiveSequence:
    """The sequence to preempt for lack of blocks: one of the client with the most running rows. Of
    its sequences, the lowest priority, then the least progress lost, then the latest.
    """
    rows = Counter(sequence.request.client for sequence in running)
    return max(
        candidates,
        key=lambda s: (rows[s.request.client], s.request.priority, -s.computed_tokens, s.id),
    )


class ClientUsage:
    """How many slots or tokens each client's running sequences hold.

    `amount` is what one sequence holds: its tokens, or one slot. `running` is sorted by
    `admission_key`.
    """

    def __init__(
        self, running: Sequence[LiveSequence], amount: Callable[[LiveSequence], int]
    ) -> None:
        self._running = running
        self._amount = amount
        self.held = Counter[str]()
        for sequence in running:
            self.held[sequence.request.client] += amount(sequence)

    def victim(self, client: str, wanted: int) -> LiveSequence | None:
        """The sequence to preempt so that the client can have `wanted` (at least 1) more.

        It is the youngest sequence of the client that keeps the most without it. None unless that
        client keeps at least as much as `client` will have. So no client preempts its own
        sequences, none keeps less than the client it makes room for, and a preempted sequence does
        not come back by this rule.
        """
        youngest = {  # of each client; one that is being aborted ends by itself
            sequence.request.client: sequence
            for sequence in self._running
            if sequence.status is Status.RUNNING
        }
        left = {self.held[own] - self._amount(one): one for own, one in youngest.items()}
        most = max(left, default=0)
        return left[most] if most >= self.held[client] + wanted else None


class NoRoom(Exception):
    """The queue is full. It has room after about `departures` sequences have left."""

    def __init__(self, message: str, departures: int) -> None:
        super().__init__(message)
        self.departures = departures


@dataclass(slots=True)
class _Client:
    """A client with live sequences."""

    n_live: int = 0
    n_places: int = 0  # places of the queue that its sequences take
    waiting: list[LiveSequence] = field(default_factory=list)  # sorted by `admission_key`


class WaitingQueue:
    """Waiting sequences by client, and the order in which clients with live sequences take turns.

    A turn is a chunk of a prompt. A client that had a turn moves after all others when the next
    step begins. A new client comes after clients that wait for a turn, and before clients that had
    one in the latest step. Preempted sequences wait again, outside the queue's limit.
    """

    def __init__(self, places: int) -> None:
        self._places = places
        self._clients = OrderedDict[str, _Client]()
        self._served: list[str] = []  # clients that had a turn in this step
        self._n_waiting = 0

    def __len__(self) -> int:
        return self._n_waiting

    def __iter__(self) -> Iterator[LiveSequence]:
        """All waiting sequences, in the order of admission if all might start."""
        for turns in zip_longest(*(client.waiting for client in self._clients.values())):
            yield from filter(None, turns)

    def __contains__(self, client: str) -> bool:
        """Whether a sequence of the client waits."""
        return client in self._clients and bool(self._clients[client].waiting)

    @property
    def clients(self) -> KeysView[str]:
        """The clients with live sequences, in the order of their turns."""
        return self._clients.keys()

    def next(self, client: str, may_start: Callable[[LiveSequence], bool]) -> LiveSequence | None:
        """The client's first sequence that may start: the one to admit at the client's turn."""
        waiting = self._clients[client].waiting if client in self else ()
        return next(filter(may_start, waiting), None)

    def mark_served(self, client: str) -> None:
        """Note that the client has had a turn in this step."""
        self._served.append(client)

    def begin_step(self) -> None:
        """Move the clients that had a turn in the previous step after all others."""
        for client in self._served:
            if client in self._clients:
                self._clients.move_to_end(client)
        self._served.clear()

    def check_room(self, client: str, n: int) -> None:
        """Raise NoRoom unless n more sequences of the client may wait.

        A client may have as many waiting sequences as there are free places, so that one client
        cannot fill the queue: Choudhury and Hahne, "Dynamic queue length thresholds" (1998), with a
        factor of 1.
        """
        places = {name: each.n_places for name, each in self._clients.items() if each.n_places}
        own, taken = places.get(client, 0), sum(places.values())
        free = self._places - taken
        missing = own + n - free
        if missing > 0:
            # A client has every len(places)-th turn, and its own departures count twice.
            departures = max(ceil(missing * len(places) / (len(places) + 1)), missing - own)
            raise NoRoom(
                f"{taken} sequences wait, {own} of them this client's, and {self._places} "
                f"may (max_waiting); a client may have as many waiting as places are free "
                f"({free}), which leaves no room for {n} more",
                departures,
            )

    def add(self, sequence: LiveSequence) -> None:
        """Queue a sequence that is new or has been preempted."""
        client = self._clients.setdefault(sequence.request.client, _Client())
        insort(client.waiting, sequence, key=admission_key)
        self._n_waiting += 1
        if sequence.status is not Status.PREEMPTED:
            client.n_live += 1
            client.n_places += 1

    def remove(self, sequence: LiveSequence) -> None:
        """Take a live sequence out of the queue. Raises ValueError if it does not wait."""
        client = self._clients.get(sequence.request.client, _Client())
        at = bisect_left(client.waiting, admission_key(sequence), key=admission_key)
        if client.waiting[at : at + 1] != [sequence]:
            raise ValueError(f"sequence {sequence.id} does not wait")
        del client.waiting[at]
        self._n_waiting -= 1
        client.n_places -= sequence.status is not Status.PREEMPTED

    def end(self, sequence: LiveSequence) -> None:
        """Count the end of a sequence that does not wait: its client has one live sequence less."""
        client = self._clients[sequence.request.client]
        client.n_live -= 1
        if not client.n_live:
            del self._clients[sequence.request.client]


class Admission:
    """Admits the sequences of a waiting queue, each with a lease, to `running`.

    If several clients find too few blocks, the one that holds least goes first; among equals, the
    one whose turn is first. No client that holds as much overtakes it, or a long prompt might
    starve. `refused` has each client's next sequence, if the store had too few blocks for it.
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
        self.waiting = WaitingQueue(limits.max_waiting)

    def add(self, sequence: LiveSequence) -> None:
        """Queue a sequence that is new or has been preempted. A running sequence that computes the
        same prefix will save its state where this one resumes.
        """
        self.waiting.add(sequence)
        prompt = sequence.queued_prompt = _queued_prompt(sequence)
        if prompt is not None:
            self._must_wait(prompt)

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
        """Whether the sequence has something to compute that no running lease will provide. In the
        background one sequence is computed at a time, and only while no other is live.
        """
        if sequence.request.is_background and (self._running or self._sequences.n_foreground):
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
        shared_tokens = sequence.request.shared_tokens
        return self._store.admit(
            sequence.namespace,
            tokens,
            reserve_tokens,
            spare_blocks,
            NEVER if shared_tokens is None else shared_tokens,
            adopts=sequence.can_use_prefix_cache,
        )


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
