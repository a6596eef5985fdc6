"""The queue of sequences that are not running."""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import zip_longest
from math import ceil

from engine.scheduling.policy import admission_key
from engine.scheduling.sequence import LiveSequence, Status


class NoRoom(Exception):
    """The sequences cannot wait now. So many `departures` by turns would make room for them."""

    def __init__(self, message: str, departures: int) -> None:
        super().__init__(message)
        self.departures = departures


class WaitingQueue:
    """A line for each client, in the order of `admission_key`.

    Who was preempted stands in line again, and takes none of the places.
    """

    def __init__(self, places: int, clients: Iterable[str]) -> None:
        """`clients`: all whose sequences may be added, at any time in the order of their turns."""
        self._places = places
        self._clients = clients
        self._lines: dict[str, list[LiveSequence]] = {}
        self._n_waiting = 0
        self._taken = 0
        self._taken_by = Counter[str]()

    def __len__(self) -> int:
        return self._n_waiting

    def __iter__(self) -> Iterator[LiveSequence]:
        """In the order in which they would be admitted if all might start."""
        lines = (self._lines[client] for client in self._clients if client in self._lines)
        for turns in zip_longest(*lines):
            yield from (sequence for sequence in turns if sequence is not None)

    def __contains__(self, client: object) -> bool:
        """Whether a sequence of the client waits."""
        return client in self._lines

    def next(self, client: str, may_start: Callable[[LiveSequence], bool]) -> LiveSequence | None:
        """Whom to admit at the client's turn: who may not start yet is passed over."""
        return next(filter(may_start, self._lines.get(client, ())), None)

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
        insort(self._lines.setdefault(client, []), sequence, key=admission_key)
        self._count(sequence, 1)

    def remove(self, sequence: LiveSequence) -> None:
        """It waits no more. Raises ValueError when the sequence does not wait."""
        client = sequence.request.client
        line = self._lines.get(client, [])
        at = bisect_left(line, admission_key(sequence), key=admission_key)
        if at == len(line) or line[at] is not sequence:
            raise ValueError(f"sequence {sequence.id} does not wait")
        del line[at]
        if not line:
            del self._lines[client]
        self._count(sequence, -1)

    def _count(self, sequence: LiveSequence, one: int) -> None:
        self._n_waiting += one
        if sequence.status is not Status.PREEMPTED:
            client = sequence.request.client
            self._taken += one
            self._taken_by[client] += one
            if not self._taken_by[client]:
                del self._taken_by[client]
