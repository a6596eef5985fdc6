"""Which waiting sequence is admitted next, and which running one is preempted for it.

Clients take turns: a turn is a chunk of a prompt. Slots and blocks are shared max-min fairly: a
client that holds less than another comes first, and what the other holds beyond that can be
preempted (docs/adr/0018).
"""

from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import takewhile, zip_longest
from math import ceil
from typing import TypeAlias

from engine.core.request import Limits
from engine.core.sequence import LiveSequence, Status, admission_key
from engine.core.step import SequenceId
from engine.disk_cache.loader import LoadAttempt
from engine.values.request import WaitReason
from kvstore.in_flight import QueuedPrompt
from kvstore.lease import Lease, Refusal
from kvstore.slots import NEVER
from kvstore.store import KVStore


def by_rows(decodes: Sequence[LiveSequence], running: Sequence[LiveSequence]) -> list[LiveSequence]:
    """The order in which decodes get blocks: those of clients that run few rows first, so that a
    sequence that is left to be preempted belongs to the client that runs most.
    """
    rows = Counter(sequence.request.client for sequence in running)
    return sorted(decodes, key=lambda s: rows[s.request.client])


def preemption_victim(
    candidates: Iterable[LiveSequence], running: Sequence[LiveSequence]
) -> LiveSequence:
    """The sequence to preempt for lack of blocks: one of the client that runs most, and of that
    client's the lowest priority, then the least progress lost, then the latest.
    """
    rows = Counter(sequence.request.client for sequence in running)
    return max(
        candidates,
        key=lambda s: (rows[s.request.client], s.request.priority, -s.computed_tokens, s.id),
    )


class ClientUsage:
    """How many slots or tokens each client's running sequences hold.

    `amount` is what one sequence holds: its tokens, or one slot.
    """

    def __init__(
        self, running: Iterable[LiveSequence], amount: Callable[[LiveSequence], int]
    ) -> None:
        self._amount = amount
        self._held = Counter[str]()
        self._youngest = dict[str, LiveSequence]()
        for sequence in running:
            client = sequence.request.client
            self._held[client] += amount(sequence)
            if sequence.status is Status.RUNNING:  # one that is being aborted ends by itself
                own = self._youngest.get(client, sequence)
                self._youngest[client] = max(own, sequence, key=admission_key)

    @classmethod
    def of_slots(cls, running: Iterable[LiveSequence]) -> "ClientUsage":
        return cls(running, lambda sequence: 1)

    @classmethod
    def of_tokens(cls, running: Iterable[LiveSequence]) -> "ClientUsage":
        return cls(running, lambda sequence: len(sequence.tokens))

    def __getitem__(self, client: str) -> int:
        return self._held[client]

    def victim(self, client: str, wanted: int) -> LiveSequence | None:
        """The sequence to preempt so that the client can have `wanted`, at least 1, more.

        It is the youngest of the client that will have most left. None unless that is at least what
        `client` will have then. So no client preempts its own sequences, none is left with less
        than the one it makes room for, and a preempted sequence does not come back by this rule.
        """
        left = {self._left(sequence): sequence for sequence in self._youngest.values()}
        most = max(left, default=0)
        return left[most] if most >= self._held[client] + wanted else None

    def _left(self, victim: LiveSequence) -> int:
        return self._held[victim.request.client] - self._amount(victim)


class Turns:
    """The clients with live sequences, in the order of their turns. A turn is a chunk of a prompt.

    A client that had a turn moves behind all others when the next step begins. A new client comes
    after those that wait for a turn, and before those that had one in the latest step.
    """

    def __init__(self) -> None:
        self._n_live = OrderedDict[str, int]()  # sequences of each
        self._served: list[str] = []  # in this step

    def __len__(self) -> int:
        return len(self._n_live)

    def __iter__(self) -> Iterator[str]:
        return iter(self._n_live)

    def enter(self, client: str) -> None:
        """The client has one live sequence more."""
        self._n_live[client] = self._n_live.get(client, 0) + 1

    def leave(self, client: str) -> None:
        """The client has one live sequence less."""
        self._n_live[client] -= 1
        if not self._n_live[client]:
            del self._n_live[client]

    def mark_served(self, client: str) -> None:
        """The client has had a turn in this step."""
        self._served.append(client)

    def begin_step(self) -> None:
        """Move the clients that had a turn in the step before behind all others."""
        if self._served:
            for client in self._served:
                if client in self._n_live:
                    self._n_live.move_to_end(client)
            self._served.clear()


ClientQueue: TypeAlias = list[LiveSequence]
"""The waiting sequences of one client, sorted by `admission_key`."""


class NoRoom(Exception):
    """The queue is full. There is room after about `departures` sequences have left it."""

    def __init__(self, message: str, departures: int) -> None:
        super().__init__(message)
        self.departures = departures


class WaitingQueue:
    """A `ClientQueue` for each client.

    Preempted sequences wait in their queue again, and take none of the places.
    """

    def __init__(self, places: int, clients: Iterable[str]) -> None:
        """`clients` iterates, at any time, over all clients in the order of their turns."""
        self._places = places
        self._clients = clients
        self._queues: dict[str, ClientQueue] = {}
        self._n_waiting = 0
        self._taken = 0
        self._taken_by = Counter[str]()

    def __len__(self) -> int:
        return self._n_waiting

    def __iter__(self) -> Iterator[LiveSequence]:
        """In the order of admission, if all might start."""
        queues = (self._queues[client] for client in self._clients if client in self._queues)
        for turns in zip_longest(*queues):
            yield from (sequence for sequence in turns if sequence is not None)

    def __contains__(self, client: object) -> bool:
        """Whether a sequence of the client waits."""
        return client in self._queues

    def next(self, client: str, may_start: Callable[[LiveSequence], bool]) -> LiveSequence | None:
        """The client's first sequence that may start, which is admitted at the client's turn."""
        return next(filter(may_start, self._queues.get(client, ())), None)

    def check_room(self, client: str, n: int) -> None:
        """Raise NoRoom unless n more sequences of the client may wait.

        A client may have as many waiting as places are free, so that one alone cannot fill the
        queue: Choudhury and Hahne, "Dynamic queue length thresholds" (1998), with a factor of 1.
        """
        own = self._taken_by[client]
        free = self._places - self._taken
        missing = own + n - free
        if missing > 0:
            clients = len(self._taken_by)  # it has every so many-th turn; its own count twice
            departures = max(ceil(missing * clients / (clients + 1)), missing - own)
            raise NoRoom(
                f"{self._taken} sequences wait, {own} of them this client's, and {self._places} "
                f"may (max_waiting); a client may have as many waiting as places are free "
                f"({free}), which leaves no room for {n} more",
                departures,
            )

    def add(self, sequence: LiveSequence) -> None:
        client = sequence.request.client
        insort(self._queues.setdefault(client, []), sequence, key=admission_key)
        self._count(sequence, 1)

    def remove(self, sequence: LiveSequence) -> None:
        """Raises ValueError when the sequence does not wait."""
        client = sequence.request.client
        queue = self._queues.get(client, [])
        at = bisect_left(queue, admission_key(sequence), key=admission_key)
        if at == len(queue) or queue[at] is not sequence:
            raise ValueError(f"sequence {sequence.id} does not wait")
        del queue[at]
        if not queue:
            del self._queues[client]
        self._count(sequence, -1)

    def _count(self, sequence: LiveSequence, one: int) -> None:
        self._n_waiting += one
        if sequence.status is not Status.PREEMPTED:
            client = sequence.request.client
            self._taken += one
            self._taken_by[client] += one
            if not self._taken_by[client]:
                del self._taken_by[client]


StartLoad: TypeAlias = Callable[[LiveSequence, LoadAttempt], bool]
"""Begins to load from disk what is worth it of a sequence's prompt; a load is a lease in flight
like any other. False where the load has to wait for others to end, and the sequence with it.
"""


@dataclass(frozen=True, slots=True)
class Refused:
    """A client's next sequence found no blocks. `n_releases` is the pool's count at that time."""

    sequence_id: SequenceId
    n_releases: int


class Admission:
    """The waiting queue, and the admission of its sequences, each with a lease.

    Of the clients that find no blocks the one that holds least goes first, by turns where several
    hold as much, and no other overtakes it that holds as much: a long prompt might starve.
    """

    def __init__(
        self,
        store: KVStore,
        limits: Limits,
        turns: Turns,
        start_load: StartLoad | None = None,
    ) -> None:
        """`start_load`: None without a disk cache."""
        self._store = store
        self._start_load = start_load
        self._max_running = limits.max_running
        self._refused: dict[str, Refused] = {}  # by client
        self._reserved_for: str | None = None  # the client of a slot that a preemption has freed
        self.turns = turns
        self.waiting = WaitingQueue(limits.max_waiting, turns)

    def add(self, sequence: LiveSequence) -> None:
        """Queue a sequence that is new or has been preempted."""
        self.waiting.add(sequence)
        if sequence.can_use_prefix_cache and not _waits_for_first(sequence):
            sequence.queued_prompt = QueuedPrompt(sequence.namespace, sequence.tokens)

    @property
    def is_anyone_refused(self) -> bool:
        """Whether a client waits for blocks, and others therefore wait for it."""
        return bool(self._refused)

    def has_slot(self, n_running: int) -> bool:
        """Whether one more sequence may run next to `n_running` others."""
        return n_running < self._max_running

    def admit(
        self, client: str, running: Sequence[LiveSequence]
    ) -> tuple[LiveSequence, Lease] | None:
        """Admit the client's next sequence, if there is room for it and no other goes first."""
        if not self._has_slot_for(client, len(running)):
            return None
        if client == self._reserved_for:
            self._reserved_for = None
        sequence = self._next(client)
        if sequence is None or not self._may_try(sequence, running):
            return None
        lease = self._lease(sequence, len(running))
        if isinstance(lease, Refusal):
            self._refused[client] = Refused(sequence.id, self._store.pool.n_releases)
            return None
        self.withdraw(sequence)
        if self._store.groups:
            self._request_checkpoints()
        return sequence, lease

    def victim(
        self, running: Sequence[LiveSequence], prompts: Container[str]
    ) -> LiveSequence | None:
        """The sequence to preempt now for another client's next one, which finds no room.

        A freed slot is for the first client in turn that runs less than the victim's. It is freed
        when none of the clients whose `prompts` are prefilled has its turn before.
        """
        if not self.waiting or len(self.turns) == 1:
            return None
        victim = self._victim_for_blocks(running) if self._refused else None
        if victim is None and not self.has_slot(len(running)):
            in_turn = takewhile(lambda client: client not in prompts, self.turns)
            victim = self._victim_for_slot(running, in_turn)
        return victim

    def withdraw(self, sequence: LiveSequence) -> None:
        """Take a sequence out of the queue."""
        client = sequence.request.client
        self.waiting.remove(sequence)
        if (refused := self._refused.get(client)) and refused.sequence_id == sequence.id:
            del self._refused[client]
        if client == self._reserved_for and client not in self.waiting:
            self._reserved_for = None
        sequence.queued_prompt = sequence.load_attempt = None

    def wait_reason(
        self,
        sequence: LiveSequence,
        n_running: int,
        is_filling: Callable[[Lease], bool] | None,
    ) -> WaitReason:
        """Why the sequence waits, by what keeps `admit` from admitting it. Changes nothing.

        A client that has been refused blocks keeps all others that may start waiting for them:
        those behind it in its own queue, and clients that hold more. `is_filling` tells loads from
        leases that compute; None without a disk cache.
        """
        if (lease := self._computing_same_prefix(sequence)) is not None:
            is_load = is_filling is not None and is_filling(lease)
            return WaitReason.DISK if is_load else WaitReason.TWIN
        if _waits_for_first(sequence):
            return WaitReason.TWIN
        if not self._has_slot_for(sequence.request.client, n_running):
            return WaitReason.SLOTS
        if (attempt := sequence.load_attempt) is not None and attempt.is_deferred:
            return WaitReason.DISK
        return WaitReason.MEMORY if self._refused else WaitReason.TURN

    def _has_slot_for(self, client: str, n_running: int) -> bool:
        """Whether one more of the client's sequences may run: a reserved slot is another's."""
        is_kept = self._reserved_for not in {None, client}
        return self.has_slot(n_running + is_kept)

    def _computing_same_prefix(self, sequence: LiveSequence) -> Lease | None:
        """The lease that is computing this prompt's prefix, if the sequence waits for one."""
        in_flight, prompt = self._store.in_flight, sequence.queued_prompt
        found = None if in_flight is None or prompt is None else in_flight.find(prompt)
        return None if found is None else found[0]

    def _may_start(self, sequence: LiveSequence) -> bool:
        """Whether it has something to compute that no lease is about to bring."""
        if _waits_for_first(sequence) or sequence.awaits_last_check:
            return False
        if not sequence.can_use_prefix_cache or _forkable(sequence) is not None:
            return True
        prompt = sequence.queued_prompt
        if prompt is None:
            prompt = QueuedPrompt(sequence.namespace, sequence.tokens)
            sequence.queued_prompt = prompt
        if self._must_wait(prompt):
            return False
        if self._start_load is None:
            return True
        attempt = sequence.load_attempt
        if attempt is None:
            attempt = sequence.load_attempt = LoadAttempt()
        attempt.is_deferred = not self._start_load(sequence, attempt)
        return not attempt.is_deferred and not self._must_wait(prompt)

    def _must_wait(self, prompt: QueuedPrompt) -> bool:
        """Whether a running request is about to compute more of the prompt than is cached."""
        return self._store.in_flight is not None and self._store.in_flight.must_wait(prompt)

    def _request_checkpoints(self) -> None:
        """A lease has begun: before steps run past them, request checkpoints where queued prompts
        will resume.
        """
        for sequence in self.waiting:
            if sequence.queued_prompt is not None:
                self._must_wait(sequence.queued_prompt)

    def _next(self, client: str) -> LiveSequence | None:
        """The client's first sequence that may start."""
        sequence = self.waiting.next(client, self._may_start)
        refused = self._refused.get(client)
        if refused and (sequence is None or sequence.id != refused.sequence_id):
            del self._refused[client]
        return sequence

    def _victim_for_blocks(self, running: Sequence[LiveSequence]) -> LiveSequence | None:
        usage = ClientUsage.of_tokens(running)
        client = self._first_of(self._refused.keys(), usage)
        sequence = self._next(client)
        if sequence is None or client not in self._refused:
            return None
        return usage.victim(client, len(sequence.tokens))

    def _victim_for_slot(
        self, running: Sequence[LiveSequence], clients: Iterable[str]
    ) -> LiveSequence | None:
        usage = ClientUsage.of_slots(running)
        for client in clients:
            victim = usage.victim(client, 1) if client in self.waiting else None
            sequence = self._next(client) if victim is not None else None
            if sequence is not None and self._may_try(sequence, running):
                self._reserved_for = client
                return victim
        return None

    def _may_try(self, sequence: LiveSequence, running: Sequence[LiveSequence]) -> bool:
        """Whether the sequence may be given blocks, if there are any.

        Not while no block has been freed since it was refused, nor while another client that was
        refused holds less, or as much and has its turn before.
        """
        if not self._refused:
            return True
        client = sequence.request.client
        refused = self._refused.get(client)
        if refused is not None and refused.n_releases == self._store.pool.n_releases:
            return False
        usage = ClientUsage.of_tokens(running)
        return client == self._first_of({client, *self._refused}, usage)

    def _first_of(self, clients: Set[str], usage: ClientUsage) -> str:
        """The client that holds least; of several, the one whose turn is first."""
        return min(filter(clients.__contains__, self.turns), key=usage.__getitem__)

    def _lease(self, sequence: LiveSequence, spare_blocks: int) -> Lease | Refusal:
        """`spare_blocks` are left for the next decodes of the running sequences."""
        tokens, namespace = sequence.tokens, sequence.namespace
        # The last token's KV is never needed.
        reserve_tokens = 1 if sequence.max_new_tokens_left > 1 else 0
        shared = sequence.request.shared_tokens
        shared_tokens = NEVER if shared is None else shared
        if not sequence.can_use_prefix_cache:
            return self._store.admit_cold(
                namespace, tokens, reserve_tokens, spare_blocks, shared_tokens
            )
        forkable = _forkable(sequence)
        if forkable is not None:
            forked_tokens = sequence.prompt_tokens - 1
            return self._store.fork(forkable, tokens, forked_tokens, reserve_tokens, spare_blocks)
        return self._store.admit(namespace, tokens, reserve_tokens, spare_blocks, shared_tokens)


def _waits_for_first(sequence: LiveSequence) -> bool:
    """Whether the first sequence of its request has yet to compute their prompt."""
    first = sequence.first
    return first is not None and first.is_live and first.output_tokens == 0


def _forkable(sequence: LiveSequence) -> Lease | None:
    """The lease of its request's first sequence, if that has computed their prompt."""
    first = sequence.first
    if sequence.admissions or first is None or first.computed_tokens < sequence.prompt_tokens:
        return None
    return first.lease
