"""Grammar processes that die or stand still while the engine thread waits for them: whose fault."""

import signal

import pytest

from engine.grammar.matcher import Allowed, Refused
from engine.grammar.remote.answers import (
    MOST_STARTS,
    NOBODY_ANSWERS,
    QUICK_LIMIT_SECONDS,
    STEP_SECONDS,
    TOO_COSTLY,
)
from engine.grammar.remote.process import (
    BUSY_FACTOR,
    START_SECONDS,
    STUCK_SECONDS,
    patience_seconds,
)
from tests.unit.grammar.scripted import MEMORY, OUTSIDE
from tests.unit.grammar.told import BITS, Told, matcher

COSTLY = Refused(TOO_COSTLY)
OUT_OF_MEMORY = -signal.SIGABRT


def test_whose_job_ends_the_quick_process_has_it_done_by_the_slow_one(told: Told) -> None:
    """It has more time there, and the others are not kept waiting."""
    culprit, others, second = matcher(), [matcher(), matcher(tokens=(3, 4))], matcher()
    told.ask(0, "a", culprit)
    told.ask(1, "a", second)
    for sequence, one in enumerate(others):
        told.ask(sequence + 2, "b", one)
    opened = told.asked(0)
    told.lose(0, opened[0])
    again = told.asked(1)
    assert [said["tokens"] for said in again] == [[], [3, 4]]
    assert [said["client"] for said in again] == ["b", "b"]
    assert [said["client"] for said in told.asked(2)] == ["a", "a"]
    assert culprit.answer is None


def test_whose_job_ends_the_slow_process_is_told_so_and_the_others_begin_again(told: Told) -> None:
    culprit, second, other = matcher(1.0), matcher(1.0), matcher(1.0, tokens=(3, 4))
    for sequence, (client, one) in enumerate([("a", culprit), ("a", second), ("b", other)]):
        told.ask(sequence, client, one)
    opened = told.asked(0)
    told.lose(0, opened[0])
    assert culprit.answer == COSTLY
    again = told.asked(1)
    assert [(said["client"], said["tokens"]) for said in again] == [("b", [3, 4]), ("a", [])]


def test_a_process_that_is_killed_from_outside_is_nobodys_fault(told: Told) -> None:
    one = matcher(1.0, tokens=(1, 2, 3))
    told.ask(0, "a", one)
    for life in range(MOST_STARTS):
        (opened,) = told.asked(life)
        assert opened["tokens"] == [1, 2, 3]
        assert one.answer is None
        told.lose(life, opened, OUTSIDE)
    assert one.answer == NOBODY_ANSWERS
    assert len(told.starts.started) == MOST_STARTS


def test_an_answer_in_between_counts_the_deaths_anew(told: Told) -> None:
    one = matcher()
    told.ask(0, "a", one)
    for life in range(2 * MOST_STARTS):
        (opened,) = told.asked(life)
        told.process(life).mask(opened["id"], life, BITS)
        told.process(life).die(OUTSIDE)
        told.wait()
        assert isinstance(one.answer, Allowed)
        told.wait()
        one.accept(life)
        told.ask(0, "a", one)


def test_a_matcher_is_unanswerable_where_no_process_starts(told: Told) -> None:
    told.starts.is_possible = False
    one = matcher()
    told.ask(0, "a", one)
    for _ in range(MOST_STARTS):
        assert one.answer is None
        told.wait()
    assert one.answer == NOBODY_ANSWERS
    told.starts.is_possible = True
    told.answers.retain(lambda sequence: False)
    two = matcher()
    told.ask(1, "a", two)
    assert len(told.asked(0)) == 1


def test_a_long_answer_is_made_again_in_the_quick_process(told: Told) -> None:
    """Of another client than the one whose job has ended it, and with a job's usual limit."""
    long = matcher(tokens=tuple(range(2000)))
    long.seconds = 0.5
    told.ask(0, "a", matcher())
    told.ask(1, "b", long)
    told.lose(0, told.asked(0)[0])
    (again,) = told.asked(1)
    assert (again["client"], again["seconds"]) == ("b", QUICK_LIMIT_SECONDS)
    assert len(again["tokens"]) == 2000


@pytest.mark.parametrize("moment", ["when that is known", "before that is known"])
def test_who_goes_while_his_job_runs_is_blamed_all_the_same(told: Told, moment: str) -> None:
    other = matcher()
    told.ask(0, "b", other)
    for life in range(MOST_STARTS):
        told.ask(1 + life, f"a{life}", matcher())
        job = told.asked(life)[-1]
        told.process(life).begin(job)
        if moment == "when that is known":
            told.wait()
        told.answers.retain(lambda sequence: sequence == 0)
        told.process(life).die()
        told.wait()
        told.wait()
    assert other.answer is None
    assert [said["client"] for said in told.asked(MOST_STARTS)] == ["b"]
    told.ask(9, "a0", matcher())
    (slow,) = told.asked(MOST_STARTS + 1)
    assert slow["seconds"] == STEP_SECONDS


def test_a_job_has_as_long_as_it_takes_on_a_busy_machine(told: Told) -> None:
    told.ask(0, "a", matcher(trial_seconds=1.0))
    (opened,) = told.asked(0)
    told.process(0).begin(opened)
    told.wait()
    told.now = STUCK_SECONDS + BUSY_FACTOR * opened["seconds"]
    told.wait()
    assert not told.process(0).is_over
    told.now += 1
    told.wait()
    assert told.process(0).is_over


def test_whose_job_is_stuck_is_blamed_though_the_daemon_kills_the_process(told: Told) -> None:
    culprit = matcher()
    told.ask(0, "a", culprit)
    for life, limit in enumerate((QUICK_LIMIT_SECONDS, STEP_SECONDS)):
        assert culprit.answer is None
        (opened,) = told.asked(life)
        assert opened["seconds"] == limit
        told.process(life).begin(opened)
        told.wait()
        told.now += patience_seconds(limit) + 1
        told.wait()
    assert culprit.answer == COSTLY


def test_a_process_that_never_begins_is_replaced_and_then_given_up(told: Told) -> None:
    one = matcher()
    told.ask(0, "a", one)
    for life in range(MOST_STARTS):
        assert one.answer is None
        assert len(told.asked(life)) == 1
        told.now += START_SECONDS + 1
        told.wait()
        assert told.process(life).is_over
    assert one.answer == NOBODY_ANSWERS


def test_what_else_is_asked_gives_a_silent_process_no_more_time(told: Told) -> None:
    told.ask(0, "a", matcher())
    told.now = START_SECONDS
    told.ask(1, "b", matcher())
    told.now += 1
    told.wait()
    assert told.process(0).is_over


def test_a_process_is_silent_between_two_jobs_as_well(told: Told) -> None:
    told.ask(0, "a", matcher())
    told.ask(1, "b", matcher())
    first, _ = told.asked(0)
    told.process(0).mask(first["id"], 0, BITS)
    told.wait()
    told.now = START_SECONDS + 1
    told.wait()
    assert told.process(0).is_over


def test_a_process_that_nobody_asks_is_not_silent(told: Told) -> None:
    one = matcher()
    told.ask(0, "a", one)
    told.ask(1, "b", matcher())
    first, _ = told.asked(0)
    told.process(0).mask(first["id"], 0, BITS)
    told.wait()
    told.answers.retain(lambda sequence: sequence == 0)
    told.now = START_SECONDS + 1
    told.wait()
    one.accept(1)
    told.ask(0, "a", one)
    told.wait()
    assert not told.process(0).is_over


def test_who_holds_the_memory_is_refused_and_not_whose_job_finds_none(told: Told) -> None:
    large, small = matcher(1.0), matcher(1.0)
    told.ask(0, "a", large)
    told.ask(1, "b", small)
    first, second = told.asked(0)
    told.process(0).begin(first)
    told.process(0).mask(first["id"], 0, BITS)
    told.wait()
    told.lose(0, second, OUT_OF_MEMORY, bytes_left=MEMORY // 10)
    (again,) = told.asked(1)
    assert again["client"] == "b"
    assert small.answer is None
    answer = large.answer
    assert isinstance(answer, Allowed)  # a step may have chosen from it
    large.accept(1)
    told.ask(0, "a", large)
    assert large.answer == COSTLY
    assert not told.asked(1)


def test_who_holds_the_memory_of_the_quick_process_moves(told: Told) -> None:
    large = matcher()
    told.ask(0, "a", large)
    told.ask(1, "b", matcher())
    first, second = told.asked(0)
    told.process(0).begin(first)
    told.process(0).mask(first["id"], 0, BITS)
    told.wait()
    told.lose(0, second, OUT_OF_MEMORY, bytes_left=MEMORY // 10)
    assert [said["client"] for said in told.asked(1)] == ["b"]
    large.accept(1)
    told.ask(0, "a", large)
    (moved,) = told.asked(2)
    assert (moved["client"], moved["seconds"]) == ("a", STEP_SECONDS)


def test_another_process_says_nothing_of_a_matcher(told: Told) -> None:
    quick, slow = matcher(), matcher(1.0)
    told.ask(0, "a", quick)
    told.ask(1, "b", slow)
    (opened,) = told.asked(0)
    told.process(1).mask(opened["id"], 0, BITS)
    told.wait()
    assert quick.answer is None
