"""Who is admitted next of those that wait, and with what of the cache."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from engine.disk_cache.recalls import Wish
from engine.sequence import LiveSequence
from engine.step import SequenceId
from engine.validation import Limits
from engine.waiting import WaitingQueue
from kvstore.announcements import Prospect
from kvstore.lease import Lease, Refusal
from kvstore.store import KVStore

Recall: TypeAlias = Callable[[LiveSequence, Wish], bool]
"""Has what is worth it of a prompt loaded from disk; what is coming then is announced. False: it
would be worth it, and is to wait for others' loads.
"""


@dataclass(slots=True)
class AdmissionCounters:
    """Counted since start; they only grow. A sequence counts when it is first admitted."""

    queried_prompt_tokens: int = 0  # of those that may adopt
    cached_prompt_tokens: int = 0


class Admission:
    """The queue and the door behind it. Who is let in has a lease."""

    def __init__(self, store: KVStore, limits: Limits, recall: Recall) -> None:
        self._store = store
        self._recall = recall
        self._wishes: dict[LiveSequence, Wish] = {}  # of those that wait
        self._max_running = limits.max_running
        self._prospects: dict[LiveSequence, Prospect] = {}  # of those that wait and may adopt
        self._refused: tuple[SequenceId, int] | None = None  # who was, after how many drops
        self.waiting = WaitingQueue(limits.max_waiting)
        self.counters = AdmissionCounters()

    def add(self, sequence: LiveSequence) -> None:
        """It waits from now on: it is new, or has been preempted."""
        self.waiting.add(sequence)
        if _adopts(sequence) and not _waits_for_first(sequence):
            self._prospect(sequence)

    def admit(self, n_running: int) -> Iterator[LiveSequence]:
        """Admit one after another, for as long as the caller asks and there is room.

        Nobody overtakes a sequence that is refused, or a long prompt might starve.
        """
        if n_running == self._max_running:  # nor is anything loaded for who cannot run
            return
        turns = self.waiting.turns(self._may_start)
        for n_others, sequence in enumerate(turns, start=n_running):
            if n_others == self._max_running or self._is_refused(sequence):
                return
            lease = self._lease(sequence, n_others)
            if isinstance(lease, Refusal):
                self._refused = sequence.id, self._store.pool.n_drops
                return
            self.waiting.take(sequence)
            self._forget(sequence)
            sequence.run_with(lease)
            if sequence.admissions == 1:
                self._count(sequence)
            yield sequence

    def withdraw(self, sequence: LiveSequence) -> None:
        """It waits no more, and will not be admitted."""
        self.waiting.remove(sequence)
        self._forget(sequence)

    def awaited(self, sequence: LiveSequence) -> Lease | None:
        """Whose tokens it waits for, where it does."""
        prospect = self._prospects.get(sequence)
        if prospect is None or prospect.awaited is None or not prospect.is_waiting:
            return None
        return prospect.awaited.lease

    def _may_start(self, sequence: LiveSequence) -> bool:
        """Whether nobody is about to compute what it could adopt."""
        if _waits_for_first(sequence):
            return False
        if not _adopts(sequence) or _forkable(sequence) is not None:
            return True
        prospect = self._prospect(sequence)
        if self._store.announcements.must_wait(prospect):
            return False
        may_start = self._recall(sequence, self._wishes.setdefault(sequence, Wish()))
        return may_start and not self._store.announcements.must_wait(prospect)

    def _is_refused(self, sequence: LiveSequence) -> bool:
        """Whether it was refused, and nobody has let go of anything since."""
        return self._refused == (sequence.id, self._store.pool.n_drops)

    def _prospect(self, sequence: LiveSequence) -> Prospect:
        prospect = self._prospects.get(sequence)
        if prospect is None:
            prospect = self._store.announcements.expect(sequence.namespace, sequence.tokens)
            self._prospects[sequence] = prospect
        return prospect

    def _forget(self, sequence: LiveSequence) -> None:
        self._wishes.pop(sequence, None)
        prospect = self._prospects.pop(sequence, None)
        if prospect is not None:
            self._store.announcements.forget(prospect)

    def _count(self, sequence: LiveSequence) -> None:
        if _adopts(sequence):
            self.counters.queried_prompt_tokens += sequence.prompt_tokens
        self.counters.cached_prompt_tokens += sequence.cached_tokens

    def _lease(self, sequence: LiveSequence, spare_blocks: int) -> Lease | Refusal:
        """`spare_blocks`: room for the next decode of everybody who runs."""
        tokens, namespace = sequence.tokens, sequence.namespace
        reserve_tokens = 1 if sequence.lacks_tokens > 1 else 0  # the last one's KV is never needed
        if not _adopts(sequence):
            return self._store.admit_cold(namespace, tokens, reserve_tokens, spare_blocks)
        forkable = _forkable(sequence)
        if forkable is not None:
            forked_tokens = sequence.prompt_tokens - 1
            return self._store.fork(forkable, tokens, forked_tokens, reserve_tokens, spare_blocks)
        return self._store.admit(namespace, tokens, reserve_tokens, spare_blocks)


def _adopts(sequence: LiveSequence) -> bool:
    """The logits that a prompt's scores take are in no cache."""
    return not sequence.lacks_scores


def _waits_for_first(sequence: LiveSequence) -> bool:
    """Whether the first of its request is yet to compute their prompt."""
    first = sequence.first
    return first is not None and first.is_live and first.output_tokens == 0


def _forkable(sequence: LiveSequence) -> Lease | None:
    """The lease of its request's first, if that has computed their prompt."""
    first = sequence.first
    if sequence.admissions or first is None or first.computed_tokens < sequence.prompt_tokens:
        return None
    return first.lease
