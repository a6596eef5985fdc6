"""Who is admitted next of those that wait, and with what of the cache."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from engine.sequence import LiveSequence
from engine.sharing import Sharing
from engine.validation import Limits
from engine.waiting import WaitingQueue
from kvstore.lease import Lease, Refusal
from kvstore.store import KVStore


@dataclass(slots=True)
class AdmissionCounters:
    """Counted since start; they only grow. A sequence counts when it is first admitted."""

    queried_prompt_tokens: int = 0  # of those that may adopt
    cached_prompt_tokens: int = 0


class Admission:
    """The queue and the door behind it. Who is let in has a lease."""

    def __init__(self, store: KVStore, sharing: Sharing, limits: Limits) -> None:
        self._store = store
        self._sharing = sharing
        self._max_running = limits.max_running
        self.waiting = WaitingQueue(limits.max_waiting)
        self.counters = AdmissionCounters()

    def admit(self, n_running: int) -> Iterator[LiveSequence]:
        """Admit one after another, for as long as the caller asks and there is room.

        Nobody overtakes a sequence that is refused, or a long prompt might starve.
        """
        turns = self.waiting.turns(self._may_start)
        for n_others, sequence in enumerate(turns, start=n_running):
            if n_others == self._max_running:
                return
            lease = self._lease(sequence, n_others)
            if isinstance(lease, Refusal):
                return
            self.waiting.take(sequence)
            self._sharing.forget(sequence)
            sequence.run_with(lease)
            if sequence.admissions == 1:
                self._count(sequence)
            self._sharing.joined(sequence, self._possible_followers(sequence))
            yield sequence

    def wait_again(self, sequence: LiveSequence) -> None:
        """It has been preempted."""
        self._sharing.left(sequence)
        self.waiting.add(sequence)

    def left(self, sequence: LiveSequence) -> None:
        """It has been admitted, and is over."""
        self._sharing.left(sequence)

    def withdraw(self, sequence: LiveSequence) -> None:
        """It waits no more, and will not be admitted."""
        self.waiting.remove(sequence)
        self._sharing.forget(sequence)

    def _may_start(self, sequence: LiveSequence) -> bool:
        """Whether nobody is about to compute what it could adopt."""
        first = sequence.first
        if first is not None and first.is_live and first.output_tokens == 0:
            return False
        return not (_adopts(sequence) and self._sharing.must_wait(sequence))

    def _possible_followers(self, leader: LiveSequence) -> Iterator[LiveSequence]:
        """Its siblings are none: they wait for its first token anyway, and fork behind that."""
        for sequence in islice(self.waiting, self._max_running):
            if _adopts(sequence) and sequence.first is not leader:
                yield sequence

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
        first = sequence.first
        forked_tokens = sequence.prompt_tokens - 1
        if (
            sequence.admissions == 0
            and first is not None
            and first.lease is not None
            and first.computed_tokens > forked_tokens
        ):
            return self._store.fork(
                first.lease, tokens, forked_tokens, reserve_tokens, spare_blocks
            )
        return self._store.admit(namespace, tokens, reserve_tokens, spare_blocks)


def _adopts(sequence: LiveSequence) -> bool:
    """The logits that a prompt's scores take are in no cache."""
    return not sequence.lacks_scores
