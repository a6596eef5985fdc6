"""A waiting queue that watches who is admitted from it."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

from engine.policy import admission_key
from engine.sequence import LiveSequence, Status
from engine.waiting import WaitingQueue


class FairQueue(WaitingQueue):
    """A queue, and the assertion that clients take turns:

    while a client has a sequence waiting that may start, no other client starts two, and each
    client's own start in order.

    A sequence may not start yet when it was last said to wait for what another computes, or for
    its first sibling's first token. One that was preempted has started before.
    """

    def __init__(self, places: int) -> None:
        super().__init__(places)
        self._held_back: set[LiveSequence] = set()
        self._starts_of_others: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def turns(self, may_start: Callable[[LiveSequence], bool]) -> Iterator[LiveSequence]:
        def noted(sequence: LiveSequence) -> bool:
            answer = may_start(sequence)
            (self._held_back.discard if answer else self._held_back.add)(sequence)
            return answer

        return super().turns(noted)

    def take(self, sequence: LiveSequence) -> None:
        super().take(sequence)
        if sequence.status is Status.WAITING:
            self._check_start(sequence)

    def remove(self, sequence: LiveSequence) -> None:
        super().remove(sequence)
        self._held_back.discard(sequence)
        client = sequence.request.client
        if not any(s.request.client == client for s in self._waiting()):
            self._starts_of_others.pop(client, None)

    def _check_start(self, started: LiveSequence) -> None:
        client = started.request.client
        ready = [s for s in self._waiting() if self._may_start(s)]
        for other in ready:
            if other.request.client == client:
                assert admission_key(started) < admission_key(other), "a client's own overtook"
        for overtaken in {s.request.client for s in ready} - {client}:
            self._starts_of_others[overtaken][client] += 1
            starts = self._starts_of_others[overtaken][client]
            assert starts == 1, f"{client} started {starts} while {overtaken} waited for its turn"
        self._starts_of_others.pop(client, None)

    def _waiting(self) -> list[LiveSequence]:
        return [s for s in super().turns(lambda _: True) if s.status is Status.WAITING]

    def _may_start(self, sequence: LiveSequence) -> bool:
        first = sequence.first
        waits_for_first = first is not None and first.is_live and first.output_tokens == 0
        return not waits_for_first and sequence not in self._held_back
