"""A limit on how many run at once that is fair between clients."""

from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from anyio import Event


class FairLimiter:
    """Has `at_once` slots. Clients that wait have a queue each, and the queues are served round
    robin: however much one client asks, every other waits for at most one of its requests.
    """

    def __init__(self, at_once: int) -> None:
        self._free = at_once
        self._queues: OrderedDict[str, deque[Event]] = OrderedDict()  # the next to be served first

    @asynccontextmanager
    async def slot(self, client: str) -> AsyncIterator[None]:
        """Hold a slot for as long as the block runs."""
        await self.acquire(client)
        try:
            yield
        finally:
            self.release()

    async def acquire(self, client: str) -> None:
        """Wait for a slot, which has to be released."""
        if self._free:
            self._free -= 1
            return
        granted = Event()
        self._queues.setdefault(client, deque()).append(granted)
        try:
            await granted.wait()
        except BaseException:
            if granted.is_set():
                self.release()
            else:
                self._leave(client, granted)
            raise

    def release(self) -> None:
        """Give a slot to the next client, if any waits."""
        if not self._queues:
            self._free += 1
            return
        client, queue = self._queues.popitem(last=False)
        queue.popleft().set()
        if queue:
            self._queues[client] = queue

    def _leave(self, client: str, granted: Event) -> None:
        queue = self._queues[client]
        queue.remove(granted)
        if not queue:
            del self._queues[client]


class Slot:
    """A request's slot of a FairLimiter, while it holds one."""

    def __init__(self) -> None:
        self._limiter: FairLimiter | None = None

    @property
    def is_held(self) -> bool:
        return self._limiter is not None

    async def acquire(self, limiter: FairLimiter, client: str) -> None:
        """Wait for a slot. The request must not hold one."""
        await limiter.acquire(client)
        self._limiter = limiter

    def release(self) -> None:
        """Does nothing where none is held."""
        limiter, self._limiter = self._limiter, None
        if limiter is not None:
            limiter.release()
