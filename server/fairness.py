"""Fair shares for clients: slots for work, and memory."""

import math
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from anyio import Event

from server.errors import ApiError


class FairLimiter:
    """Has `at_once` slots, of which one client holds at most `each`.

    Clients that wait have a queue each. A free slot goes to the client whose granted work has cost
    least, so a client with costly work has fewer turns (start-time fair queuing; Goyal, Vin and
    Cheng, 1996). A client waits for at most one request of each other client.
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


class Budget:
    """Bytes that requests hold in memory. Belongs to one event loop.

    A reservation that exceeds `max_each_bytes` is evicted. If all together exceed
    `max_total_bytes`, the largest reservation of the client that holds most is evicted, so a client
    that fills the budget loses its own.
    """

    def __init__(
        self,
        max_each_bytes: int,
        max_total_bytes: int,
        *,
        too_large: Callable[[], ApiError],
        too_much: Callable[[], ApiError],
    ) -> None:
        """`too_large` and `too_much` make the error of an evicted reservation: it is too large, or
        all together are.
        """
        self._max_each_bytes = max_each_bytes
        self.max_total_bytes = max_total_bytes
        self._too_large = too_large
        self._too_much = too_much
        self._held: defaultdict[str, set[Reservation]] = defaultdict(set)  # by client
        self.total_bytes = 0
        self.n_evicted = 0

    @contextmanager
    def reserve(self, client: str, evict: Callable[[ApiError], object]) -> Iterator["Reservation"]:
        """A reservation of a client, without bytes yet, for the time of the block.

        `evict` is called with the error of a reservation that is evicted. It ends the work that
        fills it.
        """
        reservation = Reservation(self, client, evict)
        try:
            yield reservation
        finally:
            reservation.close()

    def change(self, reservation: "Reservation", n_bytes: int) -> None:
        """Change a reservation by n_bytes, which may be negative, and evict reservations beyond the
        limits.
        """
        reservation.n_bytes += n_bytes
        self.total_bytes += n_bytes
        held = self._held[reservation.client]
        if reservation.n_bytes:
            held.add(reservation)
        else:
            held.discard(reservation)
        if not held:
            del self._held[reservation.client]
        if n_bytes > 0:
            if reservation.n_bytes > self._max_each_bytes:
                self._evict(reservation, self._too_large)
            while self.total_bytes > self.max_total_bytes:
                self._evict(self._largest(), self._too_much)

    def _largest(self) -> "Reservation":
        most = max(self._held.values(), key=lambda held: sum(one.n_bytes for one in held))
        return max(most, key=lambda one: one.n_bytes)

    def _evict(self, reservation: "Reservation", refusal: Callable[[], ApiError]) -> None:
        self.n_evicted += 1
        reservation.release()
        reservation.refusal = refusal
        if reservation.evict is not None:
            reservation.evict(refusal())


class Reservation:
    """The bytes that one request of a client holds of a Budget. Once it has been evicted it holds
    none, and `add` raises its error.
    """

    def __init__(self, budget: Budget, client: str, evict: Callable[[ApiError], object]) -> None:
        self._budget = budget
        self.client = client
        self.evict: Callable[[ApiError], object] | None = evict
        self.n_bytes = 0
        self.refusal: Callable[[], ApiError] | None = None  # makes the error, once it is evicted

    @property
    def is_evicted(self) -> bool:
        return self.refusal is not None

    def add(self, n_bytes: int) -> None:
        """Hold more bytes. Raises ApiError when it is evicted for them, or has been before."""
        if self.refusal is None:
            self._budget.change(self, n_bytes)
        if self.refusal is not None:
            raise self.refusal()

    def give_back(self, n_bytes: int) -> None:
        """Hold fewer bytes."""
        if self.refusal is None:
            self._budget.change(self, -n_bytes)

    def resize(self, n_bytes: int) -> None:
        """Hold n_bytes. Raises ApiError as `add` does."""
        self.add(n_bytes - self.n_bytes)

    def release(self) -> None:
        """Hold no bytes. More may be added."""
        if self.n_bytes:
            self._budget.change(self, -self.n_bytes)

    def close(self) -> None:
        """Hold no bytes for good, and forget `evict`, which refers to the request: a cycle would
        keep both until a full garbage collection.
        """
        self.release()
        self.evict = None
