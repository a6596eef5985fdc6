"""The threads in which bodies are parsed, prompts tokenized and answers rendered.

Python runs one thread at a time, so each busy thread delays the event loop. So there are few of
them, no client has all of one kind, and a call that takes too long is ended.
"""

import ctypes
import threading
from asyncio import get_running_loop
from collections.abc import Callable
from functools import partial
from typing import Generic, NoReturn, TypeVar

from anyio import CapacityLimiter, to_thread

from server.errors import invalid
from server.fairness import FairLimiter

LARGE_BYTES = 32 * 1024  # what is made of fewer takes milliseconds
SMALL_AT_ONCE = 2
LARGE_AT_ONCE = 2
EACH_AT_ONCE = 1
"""Slots of a kind that one client may hold: another client finds one that is free."""

CALL_BYTES = 4096
"""The cost of a call in its client's turns, in addition to the bytes that it reads."""

WORK_SECONDS = 20.0
"""The longest that one call may take. Bodies of the largest size that is allowed take one or two
seconds on a core of an AMD EPYC."""

T = TypeVar("T")


class Workers:
    """Runs the work of requests off the event loop. Belongs to one event loop."""

    def __init__(self, work_seconds: float = WORK_SECONDS) -> None:
        self._small = FairLimiter(SMALL_AT_ONCE, EACH_AT_ONCE)
        self._large = FairLimiter(LARGE_AT_ONCE, EACH_AT_ONCE)
        self._threads = CapacityLimiter(SMALL_AT_ONCE + LARGE_AT_ONCE)
        self._work_seconds = work_seconds

    async def run(self, client: str, n_bytes: int, function: Callable[[], T]) -> T:
        """Call a function that reads about `n_bytes` and return its result. Raises its exceptions,
        and ApiError (400) when it takes too long.
        """
        limiter = self._small if n_bytes <= LARGE_BYTES else self._large
        async with limiter.slot(client, n_bytes + CALL_BYTES):
            return await self._in_thread(function)

    async def _in_thread(self, function: Callable[[], T]) -> T:
        """Errors are passed as values: a future that raises one is part of its traceback, a cycle
        that would keep the parsed request alive until a full garbage collection.
        """
        call = _Call(function)
        overdue = get_running_loop().call_later(self._work_seconds, call.end)
        try:
            outcome = await to_thread.run_sync(call.run, limiter=self._threads)
        finally:
            overdue.cancel()
        try:
            return outcome()
        finally:
            del outcome


class _Overdue(BaseException):
    """Raised in a worker thread, between two instructions of a call that takes too long."""


class _Call(Generic[T]):
    """A call in a worker thread that may be ended from another, once."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function: Callable[[], T] | None = function
        self._lock = threading.Lock()
        self._thread: int | None = None  # while it runs
        self._is_overdue = False

    def run(self) -> Callable[[], T]:
        """Call the function. What it returns or raises, as a function that does so, and that no
        local name refers to: the frame is part of an error's traceback.
        """
        function, self._function = self._function, None
        assert function is not None
        with self._lock:
            self._thread = threading.get_ident()
        outcomes = list[Callable[[], T]]()
        try:
            outcomes.append(_outcome(function))
            self._finish()
        except _Overdue:
            outcomes[:] = [partial(_raise, invalid("This request takes too long to read.", None))]
        finally:
            with self._lock:
                self._thread = None
        return outcomes.pop()

    def end(self) -> None:
        """End the call where it runs Python: calls of compiled functions are finished first."""
        with self._lock:
            if self._thread is not None:
                self._is_overdue = True
                _raise_in(self._thread, _Overdue)

    def _finish(self) -> None:
        """Mark the call as finished: it cannot be ended any more. Raises _Overdue if it was
        ended.
        """
        with self._lock:
            self._thread = None
        while self._is_overdue:  # until it is raised: it would be raised in the thread's next call
            pass


def _raise_in(thread: int, error: type[BaseException]) -> None:
    """Have an exception raised in another thread."""
    raised = ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), raised)


def _outcome(function: Callable[[], T]) -> Callable[[], T]:
    try:
        result = function()
    except Exception as error:
        return partial(_raise, error)
    return lambda: result


def _raise(error: Exception) -> NoReturn:
    try:
        raise error
    finally:
        del error
