"""Calls from other threads to the engine thread."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from engine.api import EngineStopped

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
    """Calls in the order in which they were posted. After `close`, every call is refused."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Call[Any]] = SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False

    @property
    def is_closed(self) -> bool:
        return self._closed

    def post(self, function: Callable[[], T]) -> Future[T]:
        """Have `function` called between two steps. Its errors come with the result.

        Raises EngineStopped when the inbox is closed.
        """
        call = Call(function)
        with self._lock:  # so that no call slips in behind the last one that `close` refuses
            if self._closed:
                raise EngineStopped("the engine has stopped")
            self._calls.put(call)
        return call.result

    def wait(self) -> None:
        """Sleep until there is a call, and make it."""
        self._calls.get().run()

    def handle_all(self) -> None:
        """Make all calls that have been posted."""
        while not self._calls.empty():
            self._calls.get().run()

    def close(self) -> None:
        """Refuse what is still there and all that comes."""
        with self._lock:
            self._closed = True
        while not self._calls.empty():
            self._calls.get().refuse(EngineStopped("the engine has stopped"))
