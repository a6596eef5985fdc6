"""Queues calls from other threads to the engine thread."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeAlias, TypeVar

from engine.api import EngineStopped

CALLS_AT_ONCE = 64
"""The most calls run between two steps: one or two milliseconds of submissions, which delay running
sequences.
"""

STOPPED = "the engine has stopped"

T = TypeVar("T")

_Call: TypeAlias = tuple[Callable[[], Any], Future[Any]]
"""A function to be called on the engine thread, and the future of its result."""


class Inbox:
    """Runs calls in the order in which they were posted, CALLS_AT_ONCE between two steps. Urgent
    calls run first, all of them. After `close`, every call is refused.
    """

    def __init__(self) -> None:
        self.is_closed = False
        self._calls = deque[_Call]()
        self._urgent = deque[_Call]()
        self._posted = threading.Condition()

    def post(self, function: Callable[[], T], *, urgent: bool = False) -> Future[T]:
        """Have `function` called between two steps. The future gets its result or its error. A call
        that is cancelled before it runs is skipped.

        An `urgent` call runs before all queued calls that are not urgent. This is for aborts and
        shutdown: they free blocks, and there are at most as many as live requests. Raises
        EngineStopped if the inbox is closed.
        """
        result = Future[T]()
        with self._posted:  # so that no call is queued after `close` has refused the queued ones
            if self.is_closed:
                raise EngineStopped(STOPPED)
            (self._urgent if urgent else self._calls).append((function, result))
            self._posted.notify()
        return result

    @property
    def n_calls(self) -> int:
        """The number of queued calls. On any thread."""
        return len(self._urgent) + len(self._calls)

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Sleep until there is a call, for at most `timeout_seconds`."""
        with self._posted:
            self._posted.wait_for(lambda: self.n_calls > 0, timeout_seconds)

    def handle(self) -> None:
        """Run the calls that are due before the next step."""
        for _ in range(CALLS_AT_ONCE):
            while self._urgent:
                _run(*self._urgent.popleft())
            if not self._calls:
                return
            _run(*self._calls.popleft())

    def close(self) -> None:
        """Refuse the queued calls, and all later ones."""
        with self._posted:
            self.is_closed = True
        for queue in (self._urgent, self._calls):
            while queue:
                _, result = queue.popleft()
                if result.set_running_or_notify_cancel():
                    result.set_exception(EngineStopped(STOPPED))


def _run(function: Callable[[], Any], result: Future[Any]) -> None:
    if result.set_running_or_notify_cancel():
        try:
            result.set_result(function())
        except BaseException as error:  # for the caller to handle, a panic in Rust as well
            result.set_exception(error)
