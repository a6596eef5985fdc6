"""Lines of clients' jobs."""

import pytest

from engine.grammar.client_queues import ClientQueues


@pytest.fixture
def queues() -> ClientQueues[int]:
    """a's jobs are 0, 1, 2; b's is 10."""
    queues = ClientQueues[int]()
    for client, job in (("a", 0), ("a", 1), ("b", 10), ("a", 2)):
        queues.add(client, job)
    return queues


def all_taken(queues: ClientQueues[int]) -> list[int]:
    taken = []
    while (client := queues.next_client()) is not None:
        taken.append(queues.take(client))
    return taken


def test_clients_take_turns(queues: ClientQueues[int]) -> None:
    assert all_taken(queues) == [0, 10, 1, 2]
    assert not queues
    with pytest.raises(KeyError):
        queues.take("a")


def test_who_is_passed_over_keeps_the_place(queues: ClientQueues[int]) -> None:
    assert queues.next_client({"a"}) == "b"
    assert queues.next_client({"a", "b"}) is None
    assert queues.next_client() == "a"


def test_what_is_dropped_is_told_and_never_taken(queues: ClientQueues[int]) -> None:
    assert queues.drop(lambda job: job in (0, 10)) == [0, 10]
    assert all_taken(queues) == [1, 2]
    assert queues.drop(lambda job: True) == []


def test_what_is_resumed_is_its_clients_first_and_behind_the_others(
    queues: ClientQueues[int],
) -> None:
    assert queues.take("a") == 0
    queues.resume("a", 0)
    assert all_taken(queues) == [10, 0, 1, 2]
    queues.resume("a", 3)
    assert all_taken(queues) == [3]


def test_who_has_no_job_left_has_no_queue(queues: ClientQueues[int]) -> None:
    queues.drop(lambda job: job < 10)
    assert queues.next_client() == "b"
    queues.add("a", 3)
    assert all_taken(queues) == [10, 3]
