"""The queue of waiting sequences, in which clients take turns: a turn is a chunk of a prompt."""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator, KeysView
from dataclasses import dataclass, field
from itertools import zip_longest
from math import ceil

from engine.core.sequence import LiveSequence, Status, admission_key


class NoRoom(Exception):
    """The queue is full. It has room after about `departures` sequences have left."""

    def __init__(self, message: str, departures: int) -> None:
        super().__init__(message)
        self.departures = departures


@dataclass(slots=True)
class _Client:
    """A client with live sequences."""

    n_live: int = 0
    n_places: int = 0  # places of the queue that its sequences take
    waiting: list[LiveSequence] = field(default_factory=list)  # sorted by `admission_key`
    passed_over: LiveSequence | None = None


class WaitingQueue:
    """Waiting sequences by client, and the order in which clients with live sequences take turns.

    A turn is a chunk of a prompt. A client that had a turn moves after all others when the next
    step begins. A new client comes after clients that wait for a turn, and before clients that had
    one in the latest step. Preempted sequences wait again, outside the queue's limit.
    """

    def __init__(self, places: int) -> None:
        self._places = places
        self._clients = OrderedDict[str, _Client]()
        self._served: list[str] = []  # clients that had a turn in this step
        self._n_waiting = 0

    def __len__(self) -> int:
        return self._n_waiting

    def __iter__(self) -> Iterator[LiveSequence]:
        """All waiting sequences, in the order of admission if all might start."""
        for turns in zip_longest(*(client.waiting for client in self._clients.values())):
            yield from filter(None, turns)

    def __contains__(self, client: str) -> bool:
        """Whether a sequence of the client waits."""
        return client in self._clients and bool(self._clients[client].waiting)

    @property
    def clients(self) -> KeysView[str]:
        """The clients with live sequences, in the order of their turns."""
        return self._clients.keys()

    def next(self, client: str, may_start: Callable[[LiveSequence], bool]) -> LiveSequence | None:
        """The client's first sequence that may start: the one to admit at the client's turn."""
        waiting = self._clients[client].waiting if client in self else ()
        return next(filter(may_start, waiting), None)

    def mark_served(self, client: str) -> None:
        """Note that the client has had a turn in this step."""
        self._served.append(client)

    def pass_over(self, client: str, sequence: LiveSequence) -> None:
        """Note that a prompt of the client could not go on, because what it needs did not fit after
        other prompts in this step. Of each client the first counts, until it has had a turn.
        """
        entry = self._clients[client]
        if entry.passed_over is None and client not in self._served:
            entry.passed_over = sequence

    def take_passed_over(self) -> list[tuple[str, LiveSequence]]:
        """The prompts that were passed over since the last call, with their clients, in the order
        of turns. Some may have ended.
        """
        taken = list[tuple[str, LiveSequence]]()
        for name, client in self._clients.items():
            if client.passed_over is not None:
                taken.append((name, client.passed_over))
                client.passed_over = None
        return taken

    def begin_step(self) -> None:
        """Move the clients that had a turn in the previous step after all others."""
        for client in self._served:
            if client in self._clients:
                self._clients.move_to_end(client)
        self._served.clear()

    def check_room(self, client: str, n: int) -> None:
        """Raise NoRoom unless n more sequences of the client may wait.

        A client may have as many waiting sequences as there are free places, so that one client
        cannot fill the queue: Choudhury and Hahne, "Dynamic queue length thresholds" (1998), with a
        factor of 1.
        """
        places = {name: each.n_places for name, each in self._clients.items() if each.n_places}
        own, taken = places.get(client, 0), sum(places.values())
        free = self._places - taken
        missing = own + n - free
        if missing > 0:
            # A client has every len(places)-th turn, and its own departures count twice.
            departures = max(ceil(missing * len(places) / (len(places) + 1)), missing - own)
            raise NoRoom(
                f"{taken} sequences wait, {own} of them this client's, and {self._places} "
                f"may (max_waiting); a client may have as many waiting as places are free "
                f"({free}), which leaves no room for {n} more",
                departures,
            )

    def add(self, sequence: LiveSequence) -> None:
        """Queue a sequence that is new or has been preempted."""
        client = self._clients.setdefault(sequence.request.client, _Client())
        insort(client.waiting, sequence, key=admission_key)
        self._n_waiting += 1
        if sequence.status is not Status.PREEMPTED:
            client.n_live += 1
            client.n_places += 1

    def remove(self, sequence: LiveSequence) -> None:
        """Take a live sequence out of the queue. Raises ValueError if it does not wait."""
        client = self._clients.get(sequence.request.client, _Client())
        at = bisect_left(client.waiting, admission_key(sequence), key=admission_key)
        if client.waiting[at : at + 1] != [sequence]:
            raise ValueError(f"sequence {sequence.id} does not wait")
        del client.waiting[at]
        self._n_waiting -= 1
        client.n_places -= sequence.status is not Status.PREEMPTED

    def end(self, sequence: LiveSequence) -> None:
        """Count the end of a sequence that does not wait: its client has one live sequence less."""
        client = self._clients[sequence.request.client]
        client.n_live -= 1
        if not client.n_live:
            del self._clients[sequence.request.client]
