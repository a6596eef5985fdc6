"""The threads in which requests are read, rendered and made into prompts.

Python runs one of them at a time, and whoever waits for the event loop waits for each of them once.
So there are few, and of what takes long there is one.
"""

from collections.abc import Callable
from functools import partial
from typing import NoReturn, TypeVar

from anyio import CapacityLimiter, to_thread

from server.record import RequestRecord
from server.turns import Turns

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
        self._small, self._large = Turns(SMALL_AT_ONCE), Turns(LARGE_AT_ONCE)
        self._threads = CapacityLimiter(SMALL_AT_ONCE + LARGE_AT_ONCE)  # nobody else's

    async def run(self, client: str, n_bytes: int, function: Callable[[], T]) -> T:
        """What the function returns or raises, in a turn of its own. `n_bytes` is about how much it
        has to read.
        """
        turns = self._small if n_bytes <= LARGE_BYTES else self._large
        async with turns.turn(client):
            return await self._in_thread(function)

    async def prepare(self, record: RequestRecord, function: Callable[[], T]) -> T:
        """What the function makes of a request on its way to the engine.

        A large request has one turn for all of it, which whoever goes on with it ends: what a body
        is parsed into is many times as long, and so only one is there at a time.
        """
        if record.n_bytes <= LARGE_BYTES:
            return await self.run(record.client, record.n_bytes, function)
        if not record.turn.is_held:
            await record.turn.begin(self._large, record.client)
            record.held.callback(record.turn.end)
        return await self._in_thread(function)

    async def _in_thread(self, function: Callable[[], T]) -> T:
        """An error comes back as a value: the future that raised it would be in its traceback, and
        all that the request was made into would live until the next full garbage collection.
        """
        outcome = await to_thread.run_sync(partial(_outcome, function), limiter=self._threads)
        try:
            return outcome()
        finally:
            del outcome
