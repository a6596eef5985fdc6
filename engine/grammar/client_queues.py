"""Waiting jobs, one queue for each client."""

from collections import OrderedDict, deque
from collections.abc import Callable, Container
from typing import Generic, TypeVar

T = TypeVar("T")


class ClientQueues(Generic[T]):
    """Round robin over the clients: one that sends much delays only itself.

    Each client's jobs are taken first in, first out. Not thread-safe.
    """

    def __init__(self) -> None:
        self._queues: OrderedDict[str, deque[T]] = OrderedDict()  # in the order of turns

    def __bool__(self) -> bool:
        return bool(self._queues)

    def add(self, client: str, job: T) -> None:
        self._queues.setdefault(client, deque()).append(job)

    def next_client(self, passed_over: Container[str] = ()) -> str | None:
        """The client whose turn it is, without those passed over; None where no other has a job."""
        return next((client for client in self._queues if client not in passed_over), None)

    def take(self, client: str) -> T:
        """The client's first job. Its turn comes again after all others'. Raises KeyError."""
        queue = self._queues.pop(client)
        job = queue.popleft()
        if queue:
            self._queues[client] = queue
        return job

    def resume(self, client: str, job: T) -> None:
        """Put back the rest of a job that was taken, as the client's first."""
        self._queues.setdefault(client, deque()).appendleft(job)

    def drop(self, is_unwanted: Callable[[T], bool]) -> list[T]:
        """Remove jobs and return them; the order of turns is kept."""
        dropped = list[T]()
        for client, queue in tuple(self._queues.items()):
            dropped += filter(is_unwanted, queue)
            kept = deque(job for job in queue if not is_unwanted(job))
            if kept:
                self._queues[client] = kept
            else:
                del self._queues[client]
        return dropped
