"""A queue and an admission that check which sequence starts and which is preempted."""

from collections import Counter, defaultdict
from collections.abc import Container, Iterable
from typing import TypeAlias

from engine.core.admission import Admission
from engine.core.queue import WaitingQueue
from engine.core.scheduler import Scheduler
from engine.core.sequence import LiveSequence, Status, admission_key
from kvstore.lease import Lease
from tests.simulation.census import Census, Happening

Victims: TypeAlias = defaultdict[LiveSequence, set[LiveSequence]]
"""Who has been preempted for whom."""


def watch(scheduler: Scheduler, census: Census) -> None:
    """Put watchful parts into a scheduler that has not begun."""
    admission = FairAdmission(scheduler, census)
    scheduler._admission = scheduler._commit._admission = admission
    scheduler.failed_steps._admission = admission
    scheduler.waiting = admission.waiting


def rows(running: Iterable[LiveSequence]) -> Counter[str]:
    return Counter(sequence.request.client for sequence in running)


def held_tokens(running: Iterable[LiveSequence]) -> Counter[str]:
    held = Counter[str]()
    for sequence in running:
        held[sequence.request.client] += len(sequence.tokens)
    return held


class FairQueue(WaitingQueue):
    """A client that runs at least two fewer than another, and has a sequence that may start, has a
    turn within as many steps as there are clients and two, unless blocks are short.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler._limits.max_waiting)
        self._scheduler = scheduler
        self._patience = Counter[str]()
        self._preemptions = 0

    def mark_served(self, client: str) -> None:
        super().mark_served(client)
        del self._patience[client]
        self.admission.had_turn(client)

    @property
    def admission(self) -> "FairAdmission":
        assert isinstance(self._scheduler._admission, FairAdmission)
        return self._scheduler._admission

    def begin_step(self) -> None:
        super().begin_step()
        scheduler, running = self._scheduler, rows(self._scheduler.running)
        is_short = scheduler.metrics.preemptions > self._preemptions
        self._preemptions = scheduler.metrics.preemptions
        for client in self.clients:
            may_expect = running[client] + 2 <= max(running.values(), default=0)
            if is_short or self.admission.refused or not may_expect:
                del self._patience[client]
            elif self.admission.ready(client):
                self._patience[client] += 1
                waited = self._patience[client]
                assert waited <= len(self.clients) + 2, (
                    f"{client} has waited {waited} steps for its turn"
                )
            else:
                del self._patience[client]


class FairAdmission(Admission):
    """While a client has a sequence waiting that may start, and has no turn, another starts two
    only where it has less; and each client's own start in order.

    A sequence may not start yet when it was last said to wait for what another computes, or for
    its first sibling's first token.

    No sequence is preempted for its own client's, or for one that then has more. Slots that are
    freed so are no more than admissions to them, but for those whom something else held up after
    all; no row is preempted twice for the same want of blocks. Where a client's next is another
    sequence all of a sudden, as one that was preempted comes first again, its want is another, too;
    and where the next begins to wait for what another computes, or for the disk, its want is over.
    """

    def __init__(self, scheduler: Scheduler, census: Census) -> None:
        super().__init__(
            scheduler.store,
            scheduler._limits,
            scheduler.sequences,
            scheduler.costs,
            scheduler.disk,
        )
        self.waiting = FairQueue(scheduler)
        self._scheduler = scheduler
        self._census = census
        self._held_back: set[LiveSequence] = set()
        self._starts_of_others: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._open_slots = 0
        self._preempted_for: defaultdict[str, Victims] = defaultdict(lambda: defaultdict(set))

    def ready(self, client: str) -> list[LiveSequence]:
        """The client's that may start."""
        queue = self.waiting._clients[client].waiting
        return [s for s in queue if not _waits_for_first(s) and s not in self._held_back]

    def had_turn(self, client: str) -> None:
        self._starts_of_others.pop(client, None)

    def admit(self, client: str) -> tuple[LiveSequence, Lease] | None:
        has_more = self._with_more(client)
        is_reserved = self._reserved_for == client
        admitted = super().admit(client)
        self._open_slots -= is_reserved
        self._forget_wants()
        if admitted is not None:
            self._check_start(admitted[0], has_more)
        return admitted

    def victim(self, prompts: Container[str]) -> LiveSequence | None:
        reserved_before = self._reserved_for
        victim = super().victim(prompts)
        self._forget_wants()
        if victim is None:
            return None
        if self._reserved_for not in {None, reserved_before}:
            assert reserved_before is None, "another slot is freed before the first is taken"
            self._open_slots += 1
            assert self._open_slots == 1, "slots are freed for nobody"
            self._check_fair(victim, self._reserved_for, rows(self._running), 1, 1)
            self._census[Happening.CLIENT_SLOT] += 1
        else:
            held = held_tokens(self._running)
            client = min(
                (c for c in self.waiting.clients if c in self.refused), key=lambda c: held[c]
            )
            wanted = self.refused[client]
            assert wanted in self.ready(client)
            preempted = self._preempted_for[client][wanted]
            assert victim not in preempted, "is preempted twice for the same want"
            preempted.add(victim)
            self._check_fair(victim, client, held, len(victim.tokens), len(wanted.tokens))
            self._census[Happening.CLIENT_BLOCKS] += 1
        return victim

    def withdraw(self, sequence: LiveSequence) -> None:
        reserved = self._reserved_for
        super().withdraw(sequence)
        self._held_back.discard(sequence)
        client = sequence.request.client
        self._open_slots -= reserved is not None and self._reserved_for is None
        if client not in self.waiting:
            self._starts_of_others.pop(client, None)
        self._forget_wants()

    def _forget_wants(self) -> None:
        for client in self._preempted_for.keys() - self.refused.keys():
            del self._preempted_for[client]

    def _may_start(self, sequence: LiveSequence) -> bool:
        answer = super()._may_start(sequence)
        (self._held_back.discard if answer else self._held_back.add)(sequence)
        return answer

    def _check_fair(
        self, victim: LiveSequence, client: str, held: Counter[str], given: int, wanted: int
    ) -> None:
        own = victim.request.client
        assert own != client, "is preempted for its own client's"
        assert held[own] - given >= held[client] + wanted, "is preempted for whoever then has more"
        others = [s for s in self._scheduler.running if s.request.client == own]
        youngest = max((s for s in others if s.status is Status.RUNNING), key=admission_key)
        assert victim is youngest, "another than the youngest is preempted"

    def _with_more(self, client: str) -> set[str]:
        """Who has more than the client now."""
        running = self._scheduler.running
        counts, held = rows(running), held_tokens(running)
        return {
            other
            for other in self.waiting.clients
            if counts[other] > counts[client] or held[other] > held[client]
        }

    def _check_start(self, started: LiveSequence, has_more: set[str]) -> None:
        client = started.request.client
        for other in self.ready(client):
            assert admission_key(started) < admission_key(other), "a client's own overtook"
        for overtaken in {c for c in self.waiting.clients if self.ready(c)} - {client} - has_more:
            self._starts_of_others[overtaken][client] += 1
            starts = self._starts_of_others[overtaken][client]
            assert starts == 1, f"{client} started {starts} while {overtaken} waited for its turn"


def _waits_for_first(sequence: LiveSequence) -> bool:
    first = sequence.first
    return first is not None and first.is_live and first.output_tokens == 0
