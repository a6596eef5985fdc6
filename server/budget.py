"""Memory that clients share: a limit in bytes for each request, and for all together."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from server.errors import ApiError


class Budget:
    """Bytes that requests hold in memory. Belongs to one event loop.

    A reservation that exceeds `max_each_bytes` is evicted. Where all together exceed
    `max_total_bytes`, the largest of the client that holds most is evicted: a client that fills the
    budget loses its own, and others go on.
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
        """Add bytes to a reservation, or give back as many as -n_bytes, and evict what is beyond
        the limits.
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

    def add_estimate(self, n_bytes: int) -> None:
        """Hold about n_bytes more, at most half of the budget, and no more than the budget with
        what is held already: no reservation is evicted for an estimate alone. Raises ApiError as
        `add` does.
        """
        total_bytes = self._budget.max_total_bytes
        self.add(min(n_bytes, total_bytes // 2, total_bytes - self.n_bytes))

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
