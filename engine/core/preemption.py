"""Decides which running sequence is preempted for lack of blocks, or for a client that holds less.

Slots and blocks are shared max-min fairly: a client that holds less than another comes first, and
the other's excess can be preempted (docs/internals/scheduler.md).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from engine.core.sequence import LiveSequence, Status


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
