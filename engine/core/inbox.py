"""Calls from other threads to the engine thread."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from engine.api import EngineStopped

CALLS_AT_ONCE = 64
"""A millisecond or two of submissions: running sequences wait no longer for new ones."""

T = TypeVar("T")


class Call(Generic[T]):
    """A function to be called on the engine thread, and the place where its result appears."""

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

    Calls that end something go first: they free blocks, and there are no more of them than live
    requests. After `close`, every call is refused.
    """

    def __init__(self) -> None:
        self._ends: deque[Call[Any]] = deque()
        self._calls: deque[Call[Any]] = deque()
        self._posted = threading.Condition()
        self._closed = False

    @property
    def is_closed(self) -> bool:
        return self._closed

    def post(self, function: Callable[[], T]) -> Future[T]:
        """Have `function` called between two steps. Its errors come with the result; one that is
        cancelled in time is not called.

        Raises EngineStopped when the inbox is closed.
        """
        return self._post(function, self._calls)

    def post_end(self, function: Callable[[], T]) -> Future[T]:
        """The same for what ends something whose beginning has been called."""
        return self._post(function, self._ends)

    @property
    def has_calls(self) -> bool:
        """Whether a call waits to be run. On any thread."""
        return self.n_calls > 0

    @property
    def n_calls(self) -> int:
        """How many wait to be run. On any thread."""
        return len(self._ends) + len(self._calls)

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Sleep until there is a call, but no longer than that."""
        with self._posted:
            self._posted.wait_for(lambda: self.has_calls, timeout_seconds)

    def handle(self) -> None:
        """Run the calls that are due between these two steps."""
        for _ in range(CALLS_AT_ONCE):
            self._handle_ends()
            if not self._calls:
                return
            self._calls.popleft().run()

    def close(self) -> None:
        """Refuse the calls that are still queued, and all later ones."""
        with self._posted:
            self._closed = True
        for queue in (self._ends, self._calls):
            while queue:
                queue.popleft().refuse(EngineStopped("the engine has stopped"))

    def _post(self, function: Callable[[], T], queue: deque[Call[Any]]) -> Future[T]:
        call = Call(function)
        with self._posted:  # so that no call slips in behind the last one that `close` refuses
            if self._closed:
                raise EngineStopped("the engine has stopped")
            queue.append(call)
            self._posted.notify()
        return call.result

    def _handle_ends(self) -> None:
        while self._ends:
            self._ends.popleft().run()
