"""Whose job has ended a process."""

import signal

import pytest

from engine.grammar.remote.jobs import Job, Jobs
from engine.grammar.remote.process import ENDED_BY_OTHERS
from engine.grammar.remote.wire import EXCEPTION_EXIT

MEMORY = 1000


@pytest.fixture
def jobs() -> Jobs:
    return Jobs()


def begin(jobs: Jobs, *begun: tuple[int, str, int]) -> None:
    """Each with what is left of the memory."""
    for number, client, bytes_left in begun:
        jobs.begin(Job(number, client, 1.0, bytes_left))


def culprit(jobs: Jobs, exit_code: int = -signal.SIGABRT) -> int | None:
    found = jobs.culprit(exit_code)
    return None if found is None else found.number


def test_it_is_the_running_job_or_nobody(jobs: Jobs) -> None:
    begin(jobs, (1, "a", MEMORY), (2, "b", 100))
    assert culprit(jobs, -signal.SIGPROF) == 2
    assert culprit(jobs, -signal.SIGSEGV) == 2
    assert culprit(jobs, ENDED_BY_OTHERS) is None
    jobs.end()
    assert culprit(jobs, -signal.SIGPROF) is None
    assert culprit(jobs) is None


@pytest.mark.parametrize("exit_code", [-signal.SIGABRT, EXCEPTION_EXIT])
def test_where_memory_ends_it_is_who_has_taken_most(jobs: Jobs, exit_code: int) -> None:
    begin(jobs, (1, "a", MEMORY), (2, "b", 200), (3, "c", 100))
    assert culprit(jobs, exit_code) == 1


def test_who_has_asked_for_more_than_is_left_has_taken_that(jobs: Jobs) -> None:
    begin(jobs, (1, "a", MEMORY), (2, "b", 600))
    assert culprit(jobs) == 2


def test_a_clients_matchers_count_together(jobs: Jobs) -> None:
    begin(jobs, (1, "a", MEMORY), (2, "a", 850), (3, "a", 600), (4, "b", 400), (5, "b", 100))
    assert culprit(jobs) == 2


def test_what_a_matcher_takes_later_is_its_own(jobs: Jobs) -> None:
    begin(jobs, (1, "a", MEMORY), (2, "b", 990), (1, "a", 980), (2, "b", 100))
    assert culprit(jobs) == 1


def test_what_is_kept_of_matchers_that_are_gone_is_nobodys(jobs: Jobs) -> None:
    begin(jobs, (1, "a", MEMORY), (2, "b", 100))
    jobs.close(1)
    assert culprit(jobs) is None


def test_alone_it_is_to_blame(jobs: Jobs) -> None:
    begin(jobs, (1, "a", MEMORY))
    jobs.close(1)  # while its job runs
    assert culprit(jobs) == 1
