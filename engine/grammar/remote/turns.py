"""Jobs of several clients for a few worker threads."""

import threading
from typing import Generic, TypeVar

from engine.grammar.client_queues import ClientQueues

T = TypeVar("T")


class Closed(Exception):
    """There are no more jobs."""


class ClientTurns(Generic[T]):
    """Thread-safe `ClientQueues` of which each client has one worker at a time."""

    def __init__(self) -> None:
        self._queues = ClientQueues[T]()
        self._served: set[str] = set()
        self._changed = threading.Condition()
        self._is_closed = False

    def add(self, client: str, job: T) -> None:
        """Raises Closed."""
        with self._changed:
            if self._is_closed:
                raise Closed
            self._queues.add(client, job)
            self._changed.notify()

    def take(self, wait_seconds: float) -> tuple[str, T] | None:
        """The next job and its client; call `done` when it is done. None where none comes in time.

        Raises Closed.
        """
        with self._changed:
            self._changed.wait_for(self._is_ready, wait_seconds)
            if self._is_closed:
                raise Closed
            if (client := self._queues.next_client(self._served)) is None:
                return None
            self._served.add(client)
            return client, self._queues.take(client)

    def done(self, client: str) -> None:
        with self._changed:
            self._served.remove(client)
            self._changed.notify()

    def withdraw(self, job: T) -> None:
        """Remove a job. Changes nothing where a worker has taken it."""
        with self._changed:
            self._queues.drop(lambda one: one is job)

    def close(self) -> list[T]:
        """Let workers take no more. Returns the jobs that are left."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            return self._queues.drop(lambda job: True)

    def _is_ready(self) -> bool:
        return self._is_closed or self._queues.next_client(self._served) is not None
