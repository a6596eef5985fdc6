"""Which sequence goes first and which is preempted. Pure functions."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from engine.scheduling.sequence import LiveSequence


def admission_key(sequence: LiveSequence) -> tuple[int, int]:
    """Sort key of a client's queue, and of a step: by priority, then by arrival."""
    return sequence.request.priority, sequence.id


def by_rows(decodes: Sequence[LiveSequence], running: Sequence[LiveSequence]) -> list[LiveSequence]:
    """In the order in which they get blocks: those of clients that run few rows first, so that
    whoever is left to be preempted belongs to the client that runs most.
    """
    rows = Counter(sequence.request.client for sequence in running)
    return sorted(decodes, key=lambda s: rows[s.request.client])


def victim(candidates: Iterable[LiveSequence], running: Sequence[LiveSequence]) -> LiveSequence:
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
