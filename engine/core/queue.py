"""Which waiting sequence is admitted next, and which running one is preempted for it."""

from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import takewhile, zip_longest
from math import ceil
from typing import TypeAlias

from engine.core.metrics import AdmissionCounters
from engine.core.request import Limits
from engine.core.sequence import LiveSequence, Status
from engine.core.step import SequenceId
from engine.disk_cache.loader import LoadAttempt
from engine.values.request import WaitReason
from kvstore.in_flight import PendingPrompt
from kvstore.lease import Lease, Refusal
from kvstore.slots import NEVER
from kvstore.store import KVStore


def admission_key(sequence: LiveSequence) -> tuple[int, int]:
    """Sort key of a client's queue, and of a step: by priority, then by arrival."""
    return sequence.request.priority, sequence.id


def by_rows(decodes: Sequence[LiveSequence], running: Sequence[LiveSequence]) -> list[LiveSequence]:
    """In the order in which they get blocks: those of clients that run few rows first, so that
    whoever is left to be preempted belongs to the client that runs most.
    """
    rows = Counter(sequence.request.client for sequence in running)
    return sorted(decodes, key=lambda s: rows[s.request.client])


def preemption_victim(
    candidates: Iterable[LiveSequence], running: Sequence[LiveSequence]
) -> LiveSequence:
    """Who is preempted for lack of blocks: one of the client that runs most, and of that client's
    the lowest priority, then the least progress lost, then the latest.
    """
    rows = Counter(sequence.request.client for sequence in running)
    return max(
        candidates,
        key=lambda s: (rows[s.request.client], s.request.priority, -s.computed_tokens, s.id),
    )


def slots(sequence: LiveSequence) -> int:
    """What it takes, or would take, of the places to run in."""
    return 1


def tokens(sequence: LiveSequence) -> int:
    """What it takes, or would take, of the arena."""
    return len(sequence.tokens)


class Holdings:
    """How much of something scarce each client's running sequences hold."""

    def __init__(
        self, running: Iterable[LiveSequence], amount: Callable[[LiveSequence], int]
    ) -> None:
        self._amount = amount
        self._held = Counter[str]()
        self._youngest = dict[str, LiveSequence]()
        for sequence in running:
            client = sequence.request.client
            self._held[client] += amount(sequence)
            if not sequence.is_aborted:  # else it ends by itself
                own = self._youngest.get(client, sequence)
                self._youngest[client] = max(own, sequence, key=admission_key)

    def __getitem__(self, client: str) -> int:
        return self._held[client]

    def victim(self, client: str, wanted: int) -> LiveSequence | None:
        """The sequence to preempt so that the client can have `wanted`, at least 1, more.

        It is the youngest of the client that will have most left. None unless that is at least what
        `client` will have then: so no client preempts its own, none is left with less than the one
        it makes room for, and what was preempted does not come back by the same rule.
        """
        left = {self._left(sequence): sequence for sequence in self._youngest.values()}
        most = max(left, default=0)
        return left[most] if most >= self._held[client] + wanted else None

    def _left(self, victim: LiveSequence) -> int:
        return self._held[victim.request.client] - self._amount(victim)


class Turns:
    """The clients with live sequences, in the order of their turns. A turn is a chunk of a prompt.

    A client that had a turn goes behind all others when the next step begins. A new client goes
    behind those that wait for a turn, and before those that had one in the latest step.
    """

    def __init__(self) -> None:
        self._live = OrderedDict[str, int]()  # how many sequences each has
        self._had: list[str] = []  # in this step

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[str]:
        return iter(self._live)

    def enter(self, client: str) -> None:
        """The client has one live sequence more."""
        self._live[client] = self._live.get(client, 0) + 1

    def leave(self, client: str) -> None:
        """The client has one live sequence less."""
        self._live[client] -= 1
        if not self._live[client]:
            del self._live[client]

    def had(self, client: str) -> None:
        """The client has had a turn in this step."""
        self._had.append(client)

    def begin_step(self) -> None:
        """Move the clients that had a turn in the step before behind all others."""
        for client in self._had:
            if client in self._live:
                self._live.move_to_end(client)
        self._had.clear()


ClientQueue: TypeAlias = list[LiveSequence]
"""The waiting sequences of one client, sorted by `admission_key`."""


class NoRoom(Exception):
    """The queue has no room for the sequences. After so many `departures`, by turns, it would."""

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
"""Begins to load from disk what is worth it of a sequence's prompt; a load is announced like any
lease. False where the load has to wait for others to end, and the sequence with it.
"""


@dataclass(frozen=True, slots=True)
class Refused:
    """A client's next sequence found no blocks. `n_releases` is the pool's count at that time."""

    sequence_id: SequenceId
    n_releases: int


class Admission:
    """The waiting queue, and the admission of its sequences, each with a lease.

    Of the clients that find no blocks the one that holds least goes first, by turns where several
    do, and no other overtakes it that holds as much: or a long prompt might starve.
    """

    def __init__(self, store: KVStore, limits: Limits, turns: Turns, start_load: StartLoad) -> None:
        self._store = store
        self._start_load = start_load
        self._attempts: dict[LiveSequence, LoadAttempt] = {}  # of those that wait
        self._max_running = limits.max_running
        self._pending: dict[LiveSequence, PendingPrompt] = {}  # of those that wait and may adopt
        self._refused: dict[str, Refused] = {}  # by client
        self._reserved_for: str | None = None  # the slot that was just freed by a preemption
        self._turns = turns
        self.waiting = WaitingQueue(limits.max_waiting, turns)
        self.counters = AdmissionCounters()

    def add(self, sequence: LiveSequence) -> None:
        """Queue a sequence that is new or has been preempted."""
        self.waiting.add(sequence)
        if sequence.may_adopt and not _waits_for_first(sequence):
            self._pending_prompt(sequence)

    @property
    def is_anyone_refused(self) -> bool:
        """Whether a client waits for blocks, and others therefore wait for it."""
        return bool(self._refused)

    def has_slot(self, n_running: int) -> bool:
        """Whether one more sequence may run beside so many."""
        return n_running < self._max_running

    def _has_slot_for(self, client: str, n_running: int) -> bool:
        """The same for one of the client's: a slot that is reserved is another's."""
        is_kept = self._reserved_for not in {None, client}
        return self.has_slot(n_running + is_kept)

    def admit(self, client: str, running: Sequence[LiveSequence]) -> LiveSequence | None:
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
        sequence.run_with(lease)
        if sequence.admissions == 1:
            self._count(sequence)
        return sequence

    def victim(
        self, running: Sequence[LiveSequence], prompts: Container[str]
    ) -> LiveSequence | None:
        """The sequence to preempt now for another client's next, which finds no room. One a step.

        A freed slot is for the first client in turn that runs less than the victim's, and is freed
        when none of the clients whose `prompts` are computed has its turn before.
        """
        if not self.waiting or len(self._turns) == 1:
            return None
        victim = self._victim_for_blocks(running) if self._refused else None
        if victim is None and not self.has_slot(len(running)):
            in_turn = takewhile(lambda client: client not in prompts, self._turns)
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
        self._forget(sequence)

    def wait_reason(
        self, sequence: LiveSequence, n_running: int, is_filling: Callable[[Lease], bool]
    ) -> WaitReason:
        """Why the sequence waits, by what keeps `admit` from admitting it. Changes nothing.

        Who has been refused blocks keeps all others that may start waiting for them: those behind
        it in its client's queue, and clients that hold more. `is_filling` tells loads from leases.
        """
        if (lease := self._awaited(sequence)) is not None:
            return WaitReason.DISK if is_filling(lease) else WaitReason.TWIN
        if _waits_for_first(sequence):
            return WaitReason.TWIN
        if not self._has_slot_for(sequence.request.client, n_running):
            return WaitReason.SLOTS
        if (attempt := self._attempts.get(sequence)) is not None and attempt.is_put_off:
            return WaitReason.DISK
        return WaitReason.MEMORY if self._refused else WaitReason.TURN

    def _awaited(self, sequence: LiveSequence) -> Lease | None:
        """The lease for whose tokens the sequence waits; None: it waits for none."""
        pending = self._pending.get(sequence)
        if pending is None or pending.awaited is None or not pending.is_waiting:
            return None
        return pending.awaited.lease

    def _may_start(self, sequence: LiveSequence) -> bool:
        """Whether it lacks something, and no lease is about to bring what it could adopt."""
        if _waits_for_first(sequence) or sequence.has_said_all:
            return False
        if not sequence.may_adopt or _forkable(sequence) is not None:
            return True
        pending = self._pending_prompt(sequence)
        if self._store.in_flight.must_wait(pending):
            return False
        attempt = self._attempts.setdefault(sequence, LoadAttempt())
        attempt.is_put_off = not self._start_load(sequence, attempt)
        return not attempt.is_put_off and not self._store.in_flight.must_wait(pending)

    def _next(self, client: str) -> LiveSequence | None:
        """The client's first sequence that may start."""
        sequence = self.waiting.next(client, self._may_start)
        refused = self._refused.get(client)
        if refused and (sequence is None or sequence.id != refused.sequence_id):
            del self._refused[client]
        return sequence

    def _victim_for_blocks(self, running: Sequence[LiveSequence]) -> LiveSequence | None:
        holdings = Holdings(running, tokens)
        client = self._first_of(self._refused.keys(), holdings)
        sequence = self._next(client)
        if sequence is None or client not in self._refused:
            return None
        return holdings.victim(client, tokens(sequence))

    def _victim_for_slot(
        self, running: Sequence[LiveSequence], clients: Iterable[str]
    ) -> LiveSequence | None:
        holdings = Holdings(running, slots)
        for client in clients:
            victim = holdings.victim(client, 1) if client in self.waiting else None
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
        return client == self._first_of({client, *self._refused}, Holdings(running, tokens))

    def _first_of(self, clients: Set[str], holdings: Holdings) -> str:
        """The client that holds least; of several, the one whose turn is first."""
        return min(filter(clients.__contains__, self._turns), key=holdings.__getitem__)

    def _pending_prompt(self, sequence: LiveSequence) -> PendingPrompt:
        pending = self._pending.get(sequence)
        if pending is None:
            pending = self._store.in_flight.add_pending(sequence.namespace, sequence.tokens)
            self._pending[sequence] = pending
        return pending

    def _forget(self, sequence: LiveSequence) -> None:
        self._attempts.pop(sequence, None)
        pending = self._pending.pop(sequence, None)
        if pending is not None:
            self._store.in_flight.remove_pending(pending)

    def _count(self, sequence: LiveSequence) -> None:
        if sequence.may_adopt:
            self.counters.queried_prompt_tokens += sequence.prompt_tokens
        self.counters.cached_prompt_tokens += sequence.cached_tokens

    def _lease(self, sequence: LiveSequence, spare_blocks: int) -> Lease | Refusal:
        """`spare_blocks` are left for the next decodes of the running sequences."""
        tokens, namespace = sequence.tokens, sequence.namespace
        reserve_tokens = 1 if sequence.lacks_tokens > 1 else 0  # the last one's KV is never needed
        shared = sequence.request.shared_tokens
        shared_tokens = NEVER if shared is None else shared
        if not sequence.may_adopt:
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
