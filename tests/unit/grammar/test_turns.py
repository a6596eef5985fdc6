"""Clients take turns, and each has one worker at a time."""

import threading
from contextlib import suppress

import pytest

from engine.grammar.remote.turns import ClientTurns, Closed


@pytest.fixture
def turns() -> ClientTurns[int]:
    return ClientTurns[int]()


def test_clients_take_turns(turns: ClientTurns[int]) -> None:
    for job in range(3):
        turns.add("many", job)
    turns.add("one", 10)
    taken = []
    for _ in range(4):
        turn = turns.take(0.0)
        assert turn is not None
        taken.append(turn[1])
        turns.done(turn[0])
    assert taken == [0, 10, 1, 2]


def test_a_client_has_one_worker_at_a_time(turns: ClientTurns[int]) -> None:
    turns.add("a", 1)
    turns.add("a", 2)
    assert turns.take(0.0) == ("a", 1)
    assert turns.take(0.0) is None
    turns.add("b", 3)
    assert turns.take(0.0) == ("b", 3)
    turns.done("a")
    assert turns.take(0.0) == ("a", 2)


def test_who_waits_is_woken_by_work_and_by_the_end_of_work(turns: ClientTurns[int]) -> None:
    taken = []

    def work() -> None:
        with suppress(Closed):
            while (turn := turns.take(60.0)) is not None:
                taken.append(turn[1])
                turns.done(turn[0])
                seen.set()

    seen = threading.Event()
    worker = threading.Thread(target=work)
    worker.start()
    turns.add("a", 1)
    assert seen.wait(60.0)
    assert turns.close() == []
    worker.join(60.0)
    assert taken == [1]


def test_who_is_done_makes_room_for_a_worker_that_waits(turns: ClientTurns[int]) -> None:
    turns.add("a", 1)
    turns.add("a", 2)
    assert turns.take(0.0) == ("a", 1)
    second = []
    worker = threading.Thread(target=lambda: second.append(turns.take(60.0)))
    worker.start()
    turns.done("a")
    worker.join(60.0)
    assert second == [("a", 2)]


def test_what_is_withdrawn_is_forgotten(turns: ClientTurns[int]) -> None:
    for job in (1, 2, 3):
        turns.add("a", job)
    assert turns.take(0.0) == ("a", 1)
    turns.withdraw(2)
    turns.withdraw(1)  # somebody has it
    assert turns.close() == [3]


def test_closed_it_hands_back_what_nobody_takes(turns: ClientTurns[int]) -> None:
    turns.add("a", 1)
    turns.add("b", 2)
    assert turns.close() == [1, 2]
    with pytest.raises(Closed):
        turns.add("a", 3)
    with pytest.raises(Closed):
        turns.take(0.0)
