"""Who goes first and who gives way. Pure functions."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from engine.scheduling.sequence import LiveSequence


def admission_key(sequence: LiveSequence) -> tuple[int, int]:
    """Sort key of a client's line in the queue, and of a step: by priority, then by arrival."""
    return sequence.request.priority, sequence.id


def by_rows(decodes: Sequence[LiveSequence], running: Sequence[LiveSequence]) -> list[LiveSequence]:
    """In the order in which they get blocks: those of clients that run few rows before others', so
    that whoever is left to give way is one of the client that runs most.
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

    def giver(self, client: str, wanted: int) -> LiveSequence | None:
        """Who gives way so that the client can have `wanted`, at least 1, more.

        The youngest of whoever will have most left, and nobody unless that is at least what the
        client will have: so no client gives way to itself, or is left with less than it makes room
        for, and who gave way does not come back by the same rule.
        """
        left = {self._left(sequence): sequence for sequence in self._youngest.values()}
        most = max(left, default=0)
        return left[most] if most >= self._held[client] + wanted else None

    def _left(self, giver: LiveSequence) -> int:
        return self._held[giver.request.client] - self._amount(giver)
