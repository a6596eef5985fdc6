"""A limit on how many run at once that is fair between clients."""

import math
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from anyio import Event


class FairLimiter:
    """Has `at_once` slots, of which one client holds `each` at most.

    Clients that wait have a queue each. A free slot goes to the client that has been granted least,
    by the cost of what it was granted: while others wait, one that asks for much has fewer turns
    (start-time fair queuing; Goyal, Vin and Cheng, 1996). However much one client asks, every other
    waits for at most one of its requests.
    """

    def __init__(self, at_once: int, each: int) -> None:
        self._free = at_once
        self._each = each
        self._held = Counter[str]()
        self._queues: dict[str, deque[tuple[float, Event]]] = {}  # the first to come first
        self._granted: dict[str, float] = {}  # costs, of clients that have been granted more
        self._least_granted = 0.0

    @asynccontextmanager
    async def slot(self, client: str, cost: float = 1.0) -> AsyncIterator[None]:
        """Hold a slot for as long as the block runs."""
        await self.acquire(client, cost)
        try:
            yield
        finally:
            self.release(client)

    async def acquire(self, client: str, cost: float = 1.0) -> None:
        """Wait for a slot, which the client has to release."""
        if self._free and self._held[client] < self._each:
            self._grant(client, cost)
            return
        granted = Event()
        self._queues.setdefault(client, deque()).append((cost, granted))
        try:
            await granted.wait()
        except BaseException:
            if granted.is_set():
                self.release(client)
            else:
                self._leave(client, granted)
            raise

    def release(self, client: str) -> None:
        """Give a slot back, and to the next that waits."""
        self._free += 1
        self._held[client] -= 1
        if not self._held[client]:
            del self._held[client]
        may_hold = [one for one in self._queues if self._held[one] < self._each]
        if may_hold:
            chosen = min(may_hold, key=self._start)
            queue = self._queues[chosen]
            cost, granted = queue.popleft()
            if not queue:
                del self._queues[chosen]
            self._grant(chosen, cost)
            granted.set()
        elif not self._held:
            self._granted.clear()

    def _grant(self, client: str, cost: float) -> None:
        start = self._start(client)
        self._free -= 1
        self._held[client] += 1
        self._least_granted = start
        later = {name: end for name, end in self._granted.items() if end > start}
        self._granted = {**later, client: start + cost}

    def _start(self, client: str) -> float:
        return max(self._granted.get(client, -math.inf), self._least_granted)

    def _leave(self, client: str, granted: Event) -> None:
        queue = self._queues[client]
        self._queues[client] = deque(one for one in queue if one[1] is not granted)
        if not self._queues[client]:
            del self._queues[client]


class Slot:
    """A request's slot of a FairLimiter, while it holds one."""

    def __init__(self) -> None:
        self._limiter: FairLimiter | None = None
        self._client = ""

    @property
    def is_held(self) -> bool:
        return self._limiter is not None

    async def acquire(self, limiter: FairLimiter, client: str, cost: float) -> None:
        """Wait for a slot. The request must not hold one."""
        await limiter.acquire(client, cost)
        self._limiter, self._client = limiter, client

    def release(self) -> None:
        """Does nothing where none is held."""
        limiter, self._limiter = self._limiter, None
        if limiter is not None:
            limiter.release(self._client)
