"""Calls from other threads to the engine thread."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from engine.api import EngineStopped

CALLS_AT_ONCE = 64
"""Calls run between two steps: a millisecond or two of submissions, for which running sequences
wait."""

T = TypeVar("T")


class Call(Generic[T]):
    """A function to be called on the engine thread, and the future of its result."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self.result: Future[T] = Future()

    def run(self) -> None:
        if self.result.set_running_or_notify_cancel():
            try:
                self.result.set_result(self._function())
            except Exception as error:  # the caller's to handle, not the loop's
                self.result.set_exception(error)

    def refuse(self, error: Exception) -> None:
        if self.result.set_running_or_notify_cancel():
            self.result.set_exception(error)


class Inbox:
    """Calls in the order in which they were posted, CALLS_AT_ONCE between two steps.

    Urgent calls run first. After `close`, every call is refused.
    """

    def __init__(self) -> None:
        self._urgent: deque[Call[Any]] = deque()
        self._calls: deque[Call[Any]] = deque()
        self._posted = threading.Condition()
        self._closed = False

    @property
    def is_closed(self) -> bool:
        return self._closed

    def post(self, function: Callable[[], T]) -> Future[T]:
        """Have `function` called between two steps. Its errors come with the result. A call that is
        cancelled before it runs is skipped.

        Raises EngineStopped when the inbox is closed.
        """
        return self._post(function, self._calls)

    def post_urgent(self, function: Callable[[], T]) -> Future[T]:
        """Post a call that runs before all queued calls that are not urgent.

        For aborts and shutdown: they free blocks, and there are no more of them than live requests.
        Raises EngineStopped when the inbox is closed.
        """
        return self._post(function, self._urgent)

    @property
    def has_calls(self) -> bool:
        """Whether a call waits to be run. On any thread."""
        return bool(self._urgent or self._calls)

    @property
    def n_calls(self) -> int:
        """Number of calls that wait to be run. On any thread."""
        return len(self._urgent) + len(self._calls)

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Sleep until there is a call, for at most `timeout_seconds`."""
        with self._posted:
            self._posted.wait_for(lambda: self.has_calls, timeout_seconds)

    def handle(self) -> None:
        """Run the calls that are due between these two steps."""
        for _ in range(CALLS_AT_ONCE):
            while self._urgent:
                self._urgent.popleft().run()
            if not self._calls:
                return
            self._calls.popleft().run()

    def close(self) -> None:
        """Refuse the calls that are still queued, and all later ones."""
        with self._posted:
            self._closed = True
        for queue in (self._urgent, self._calls):
            while queue:
                queue.popleft().refuse(EngineStopped("the engine has stopped"))

    def _post(self, function: Callable[[], T], queue: deque[Call[Any]]) -> Future[T]:
        call = Call(function)
        with self._posted:  # so that no call is queued after the last one that `close` refuses
            if self._closed:
                raise EngineStopped("the engine has stopped")
            queue.append(call)
            self._posted.notify()
        return call.result
