"""The queue of sequences that are not running, and the order of the clients' turns."""

from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from itertools import zip_longest
from math import ceil
from typing import TypeAlias

from engine.scheduling.policy import admission_key
from engine.scheduling.sequence import LiveSequence, Status


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
