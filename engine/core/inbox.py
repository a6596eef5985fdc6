"""Calls from other threads to the engine thread."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeAlias, TypeVar

from engine.api import EngineStopped

CALLS_AT_ONCE = 64
"""Calls run between two steps: a millisecond or two of submissions, for which running sequences
wait."""

STOPPED = "the engine has stopped"

T = TypeVar("T")

_Call: TypeAlias = tuple[Callable[[], Any], Future[Any]]
"""A function to be called on the engine thread, and the future of its result."""


class Inbox:
    """Calls in the order in which they were posted, CALLS_AT_ONCE between two steps. Urgent calls
    run first, and all of them. After `close`, every call is refused.
    """

    def __init__(self) -> None:
        self.is_closed = False
        self._calls = deque[_Call]()
        self._urgent = deque[_Call]()
        self._posted = threading.Condition()

    def post(self, function: Callable[[], T], *, urgent: bool = False) -> Future[T]:
        """Have `function` called between two steps. Its errors come with the result. A call that is
        cancelled before it runs is skipped.

        An `urgent` call runs before all queued calls that are not. That is for aborts and shutdown:
        they free blocks, and there are no more of them than live requests. Raises EngineStopped
        when the inbox is closed.
        """
        result = Future[T]()
        with self._posted:  # so that no call is queued after the last one that `close` refuses
            if self.is_closed:
                raise EngineStopped(STOPPED)
            (self._urgent if urgent else self._calls).append((function, result))
            self._posted.notify()
        return result

    @property
    def n_calls(self) -> int:
        """Number of calls that wait to be run. On any thread."""
        return len(self._urgent) + len(self._calls)

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Sleep until there is a call, for at most `timeout_seconds`."""
        with self._posted:
            self._posted.wait_for(lambda: self.n_calls > 0, timeout_seconds)

    def handle(self) -> None:
        """Run the calls that are due between these two steps."""
        for _ in range(CALLS_AT_ONCE):
            while self._urgent:
                _run(*self._urgent.popleft())
            if not self._calls:
                return
            _run(*self._calls.popleft())

    def close(self) -> None:
        """Refuse the calls that are still queued, and all later ones."""
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
        except Exception as error:  # the caller's to handle, not the loop's
            result.set_exception(error)
