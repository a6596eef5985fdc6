"""Lines of clients' jobs."""

import pytest

from engine.constraints.lines import ClientLines


@pytest.fixture
def lines() -> ClientLines[int]:
    """a's jobs are 0, 1, 2; b's is 10."""
    lines = ClientLines[int]()
    for client, job in (("a", 0), ("a", 1), ("b", 10), ("a", 2)):
        lines.add(client, job)
    return lines


def all_taken(lines: ClientLines[int]) -> list[int]:
    taken = []
    while (client := lines.next_client()) is not None:
        taken.append(lines.take(client))
    return taken


def test_clients_take_turns(lines: ClientLines[int]) -> None:
    assert all_taken(lines) == [0, 10, 1, 2]
    assert not lines
    with pytest.raises(KeyError):
        lines.take("a")


def test_who_is_passed_over_keeps_the_place(lines: ClientLines[int]) -> None:
    assert lines.next_client({"a"}) == "b"
    assert lines.next_client({"a", "b"}) is None
    assert lines.next_client() == "a"


def test_what_is_dropped_is_told_and_never_taken(lines: ClientLines[int]) -> None:
    assert lines.drop(lambda job: job in (0, 10)) == [0, 10]
    assert all_taken(lines) == [1, 2]
    assert lines.drop(lambda job: True) == []


def test_what_is_resumed_is_its_clients_first_and_behind_the_others(
    lines: ClientLines[int],
) -> None:
    assert lines.take("a") == 0
    lines.resume("a", 0)
    assert all_taken(lines) == [10, 0, 1, 2]
    lines.resume("a", 3)
    assert all_taken(lines) == [3]


def test_who_has_no_job_left_has_no_line(lines: ClientLines[int]) -> None:
    lines.drop(lambda job: job < 10)
    assert lines.next_client() == "b"
    lines.add("a", 3)
    assert all_taken(lines) == [10, 3]
