"""Who loses what where clients share memory."""

from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.errors import ApiError
from server.fairness import Budget, Reservation

EACH_BYTES, TOTAL_BYTES = 100, 200


def budget(each_bytes: int = EACH_BYTES) -> Budget:
    return Budget(
        each_bytes,
        TOTAL_BYTES,
        too_large=lambda: ApiError(400, "too large"),
        too_much=lambda: ApiError(503, "too much"),
    )


class Held:
    """Reservations, and those of them that were evicted."""

    def __init__(self, budget: Budget, stack: ExitStack) -> None:
        self._budget = budget
        self._stack = stack
        self.evicted: list[Reservation] = []

    def of(self, client: str) -> Reservation:
        reservation = self._stack.enter_context(
            self._budget.reserve(client, lambda error: self.evicted.append(reservation))
        )
        return reservation


def test_a_reservation_that_is_too_large_is_evicted_and_raises_for_good() -> None:
    with ExitStack() as stack:
        held = Held(budget(), stack)
        one, other = held.of("a"), held.of("a")
        other.add(EACH_BYTES)
        for _ in range(2):
            with pytest.raises(ApiError, match="too large"):
                one.add(EACH_BYTES + 1)
        assert held.evicted == [one]
        assert one.n_bytes == 0
        one.give_back(50)
        other.give_back(EACH_BYTES)
        assert (one.n_bytes, other.n_bytes) == (0, 0)


def test_the_largest_of_the_client_that_holds_most_makes_room() -> None:
    with ExitStack() as stack:
        shared = budget()
        held = Held(shared, stack)
        largest_of_all = held.of("modest")
        largest_of_all.add(80)
        many = [held.of("greedy") for _ in range(4)]
        for size, reservation in enumerate(many, start=20):
            reservation.add(size)
        assert held.evicted == []
        small = held.of("small")
        small.add(40)  # fits, because the greedy client makes room
        assert held.evicted == [many[-1]]
        with pytest.raises(ApiError, match="too much"):
            many[-1].add(1)
        assert shared.n_evicted == 1


def test_as_many_are_evicted_as_it_takes() -> None:
    with ExitStack() as stack:
        held = Held(budget(), stack)
        many = [held.of("greedy") for _ in range(10)]
        for reservation in many:
            reservation.add(20)
        held.of("other").add(90)
        assert len(held.evicted) == 5


def test_all_bytes_come_back_at_the_end() -> None:
    shared = budget()
    with shared.reserve("a", lambda error: None) as one:
        one.add(70)
    assert shared.total_bytes == 0
    with shared.reserve("a", lambda error: None) as one:
        one.add(70)
        one.release()
        assert shared.total_bytes == 0
        one.add(10)
        assert shared.total_bytes == 10
    assert shared.total_bytes == 0


CLIENTS = st.sampled_from(["a", "b", "c"])
CHANGES = st.lists(st.tuples(CLIENTS, st.integers(0, 4), st.integers(-60, 120)), max_size=60)


@given(CHANGES)
def test_the_total_is_what_is_held_and_a_client_below_its_share_loses_nothing(
    changes: list[tuple[str, int, int]],
) -> None:
    shared = budget(each_bytes=TOTAL_BYTES)
    with ExitStack() as stack:
        held = Held(shared, stack)
        all_held = {(client, i): held.of(client) for client in "abc" for i in range(5)}

        def held_by(client: str) -> int:
            return sum(one.n_bytes for (owner, _), one in all_held.items() if owner == client)

        for client, i, n_bytes in changes:
            one = all_held[client, i]
            before = {other: held_by(other) for other in "abc"}
            n_evicted = len(held.evicted)
            if n_bytes < 0:
                one.give_back(min(-n_bytes, one.n_bytes))
            elif not one.is_evicted:
                before[client] += n_bytes
                try:
                    one.add(n_bytes)
                except ApiError:
                    assert one in held.evicted
            assert shared.total_bytes == sum(map(held_by, "abc")) <= TOTAL_BYTES
            for loser in held.evicted[n_evicted:]:
                assert before[loser.client] > TOTAL_BYTES / 3
    assert shared.total_bytes == 0
