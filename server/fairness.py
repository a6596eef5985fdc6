"""Fair shares for clients: slots for work, and memory."""

import ctypes
import math
import threading
from asyncio import get_running_loop
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Generic, NoReturn, TypeVar

from anyio import CapacityLimiter, Event, to_thread

from server.errors import ApiError, invalid


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
