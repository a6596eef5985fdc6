"""Work of several clients for a few workers."""

import threading
from collections import OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Closed(Exception):
    """There is no more work."""


class ClientTurns(Generic[T]):
    """Clients take turns, and each has one worker at a time: who sends much waits for itself."""

    def __init__(self) -> None:
        self._lines: OrderedDict[str, deque[T]] = OrderedDict()
        self._served: set[str] = set()
        self._changed = threading.Condition()
        self._is_closed = False

    def add(self, client: str, job: T) -> None:
        """Raises Closed."""
        with self._changed:
            if self._is_closed:
                raise Closed
            self._lines.setdefault(client, deque()).append(job)
            self._changed.notify()

    def take(self, wait_seconds: float) -> tuple[str, T] | None:
        """The next job, and whose it is: `done` when it is. None where none comes for so long.

        Raises Closed.
        """
        with self._changed:
            self._changed.wait_for(self._is_ready, wait_seconds)
            if self._is_closed:
                raise Closed
            if (client := self._next_client()) is None:
                return None
            line = self._lines.pop(client)
            job = line.popleft()
            if line:
                self._lines[client] = line
            self._served.add(client)
            return client, job

    def done(self, client: str) -> None:
        with self._changed:
            self._served.remove(client)
            self._changed.notify()

    def close(self) -> list[T]:
        """The jobs that nobody will take."""
        with self._changed:
            self._is_closed = True
            left = [job for line in self._lines.values() for job in line]
            self._lines.clear()
            self._changed.notify_all()
        return left

    def _is_ready(self) -> bool:
        return self._is_closed or self._next_client() is not None

    def _next_client(self) -> str | None:
        return next((client for client in self._lines if client not in self._served), None)
