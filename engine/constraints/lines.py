"""Jobs that wait, each of a client."""

from collections import OrderedDict, deque
from collections.abc import Callable, Container
from typing import Generic, TypeVar

T = TypeVar("T")


class ClientLines(Generic[T]):
    """A line for each client, and the lines take turns: who sends much waits for itself.

    A client's jobs are taken in order. Not safe between threads.
    """

    def __init__(self) -> None:
        self._lines: OrderedDict[str, deque[T]] = OrderedDict()  # in the order of turns

    def __bool__(self) -> bool:
        return bool(self._lines)

    def add(self, client: str, job: T) -> None:
        self._lines.setdefault(client, deque()).append(job)

    def next_client(self, passed_over: Container[str] = ()) -> str | None:
        """Whose turn it is; None where nobody waits but those who are passed over."""
        return next((client for client in self._lines if client not in passed_over), None)

    def take(self, client: str) -> T:
        """The client's first job; its others are behind everybody's. Raises KeyError."""
        line = self._lines.pop(client)
        job = line.popleft()
        if line:
            self._lines[client] = line
        return job

    def resume(self, client: str, job: T) -> None:
        """The rest of a job that was taken: the client's first again, behind everybody's turn."""
        self._lines.setdefault(client, deque()).appendleft(job)

    def drop(self, is_unwanted: Callable[[T], bool]) -> list[T]:
        """Forget jobs, and return them; the turns stay as they are."""
        dropped = list[T]()
        for client, line in tuple(self._lines.items()):
            dropped += filter(is_unwanted, line)
            kept = deque(job for job in line if not is_unwanted(job))
            if kept:
                self._lines[client] = kept
            else:
                del self._lines[client]
        return dropped
