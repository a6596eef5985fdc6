"""The threads in which bodies are parsed, prompts tokenized and answers rendered.

Python runs one thread at a time, so each busy thread delays the event loop. So there are few of
them, and one for large requests.
"""

from collections.abc import Callable
from functools import partial
from typing import NoReturn, TypeVar

from anyio import CapacityLimiter, to_thread

from server.fair_limiter import FairLimiter
from server.record import RequestRecord

LARGE_BYTES = 32 * 1024  # what is made of fewer takes milliseconds
SMALL_AT_ONCE = 2
LARGE_AT_ONCE = 1

T = TypeVar("T")


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


class Workers:
    """Runs what a request needs off the event loop. Belongs to one event loop."""

    def __init__(self) -> None:
        self._small, self._large = FairLimiter(SMALL_AT_ONCE), FairLimiter(LARGE_AT_ONCE)
        self._threads = CapacityLimiter(SMALL_AT_ONCE + LARGE_AT_ONCE)

    async def run(self, client: str, n_bytes: int, function: Callable[[], T]) -> T:
        """Call a function that reads about `n_bytes`. Returns or raises what it does."""
        limiter = self._small if n_bytes <= LARGE_BYTES else self._large
        async with limiter.slot(client):
            return await self._in_thread(function)

    async def prepare(self, record: RequestRecord, function: Callable[[], T]) -> T:
        """Call a function that prepares a request for the engine. Returns or raises what it does.

        A large request holds one slot through all such calls, until `record.slot.release()`: a
        parsed body takes many times its bytes, so only one may be there at a time.
        """
        if record.n_bytes <= LARGE_BYTES:
            return await self.run(record.client, record.n_bytes, function)
        if not record.slot.is_held:
            await record.slot.acquire(self._large, record.client)
            record.held.callback(record.slot.release)
        return await self._in_thread(function)

    async def _in_thread(self, function: Callable[[], T]) -> T:
        """Errors are passed as values: a future that raises one is part of its traceback, a cycle
        that would keep the parsed request alive until a full garbage collection.
        """
        outcome = await to_thread.run_sync(partial(_outcome, function), limiter=self._threads)
        try:
            return outcome()
        finally:
            del outcome
