"""The queue of sequences that are not running. Clients take turns in it."""

from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from math import ceil

from engine.policy import admission_key
from engine.sequence import LiveSequence, Status


class NoRoom(Exception):
    """The sequences cannot wait now. So many `departures` by turns would make room for them."""

    def __init__(self, message: str, departures: int) -> None:
        super().__init__(message)
        self.departures = departures


class WaitingQueue:
    """A line for each client, in the order of `admission_key`. A turn admits one sequence.

    A client that has had its turn goes behind all others that wait, and so does one that begins to
    wait: until its next turn every other has at most one. Who was preempted has had its turn, takes
    no place and goes before all lines.
    """

    def __init__(self, places: int) -> None:
        self._places = places
        self._lines: OrderedDict[str, list[LiveSequence]] = OrderedDict()  # in the order of turns
        self._preempted: list[LiveSequence] = []

    def __len__(self) -> int:
        return len(self._preempted) + self._taken

    def __iter__(self) -> Iterator[LiveSequence]:
        """In the order in which they would be admitted if all might start."""
        return self.turns(lambda sequence: True)

    def turns(self, may_start: Callable[[LiveSequence], bool]) -> Iterator[LiveSequence]:
        """Whom to admit, one after another. `take` each before asking for the next.

        Who may not start yet is passed over; its client keeps its turn for the others in its line,
        and its place.
        """
        yield from filter(may_start, tuple(self._preempted))
        lines = deque(iter(tuple(line)) for line in self._lines.values())
        while lines:
            line = lines.popleft()
            sequence = next(filter(may_start, line), None)
            if sequence is not None:
                yield sequence
                lines.append(line)

    def check_room(self, client: str, n: int) -> None:
        """Raise NoRoom unless n more sequences of the client may wait.

        A client may have as many waiting as places are free, so that one alone cannot fill the
        queue: Choudhury and Hahne, "Dynamic queue length thresholds" (1998), with a factor of 1.
        """
        own = len(self._lines.get(client, ()))
        free = self._places - self._taken
        missing = own + n - free
        if missing > 0:
            clients = len(self._lines)  # it has every so many-th turn; its own count twice
            departures = max(ceil(missing * clients / (clients + 1)), missing - own)
            raise NoRoom(
                f"{self._taken} sequences wait, {own} of them this client's, and {self._places} "
                f"may (max_waiting); a client may have as many waiting as places are free "
                f"({free}), which leaves no room for {n} more",
                departures,
            )

    def add(self, sequence: LiveSequence) -> None:
        if sequence.status is Status.PREEMPTED:
            line = self._preempted
        else:
            line = self._lines.setdefault(sequence.request.client, [])
        insort(line, sequence, key=admission_key)

    def take(self, sequence: LiveSequence) -> None:
        """It is admitted: the turn is over. Raises ValueError when the sequence does not wait."""
        self.remove(sequence)
        client = sequence.request.client
        if sequence.status is not Status.PREEMPTED and client in self._lines:
            self._lines.move_to_end(client)

    def remove(self, sequence: LiveSequence) -> None:
        """It waits no more. Raises ValueError when the sequence does not wait."""
        client = sequence.request.client
        is_preempted = sequence.status is Status.PREEMPTED
        line = self._preempted if is_preempted else self._lines.get(client, [])
        at = bisect_left(line, admission_key(sequence), key=admission_key)
        if at == len(line) or line[at] is not sequence:
            raise ValueError(f"sequence {sequence.id} does not wait")
        del line[at]
        if not line and not is_preempted:
            del self._lines[client]

    @property
    def _taken(self) -> int:
        return sum(map(len, self._lines.values()))
