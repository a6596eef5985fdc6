"""Workers that die or stand still while sequences wait for them: whose fault that is."""

import pytest

from engine.grammar.answers import NOBODY_ANSWERS, TOO_COSTLY
from engine.grammar.pool import MOST_FRUITLESS, START_SECONDS
from engine.grammar.queue import (
    SHORT_LIMIT_SECONDS,
    STEP_SECONDS,
    USAGE_SECONDS,
    Job,
    Session,
    WorkerSlot,
    patience_seconds,
)
from engine.grammar.state import Allowed, Refused
from engine.grammar.wire import MEMORY_BYTES
from engine.values.request import Grammar, GrammarKind
from tests.unit.grammar.scripted import (
    CRASH,
    MEMORY,
    OUT_OF_MEMORY,
    OUTSIDE,
    Scene,
    matcher,
)

COSTLY = Refused(TOO_COSTLY)


def test_whose_job_ends_the_first_worker_has_it_done_elsewhere_with_more_time(
    scene: Scene,
) -> None:
    culprit, other = matcher(), matcher(tokens=(3, 4))
    scene.ask(0, "a", culprit)
    scene.ask(1, "b", other)
    opened, _ = scene.requests(0)
    assert opened["seconds"] == SHORT_LIMIT_SECONDS
    scene.lose(0)
    (again,), (alone,) = scene.requests(1), scene.requests(2)
    assert (again["tokens"], again["seconds"]) == ([3, 4], SHORT_LIMIT_SECONDS)
    assert (alone["tokens"], alone["seconds"]) == ([], STEP_SECONDS)
    assert culprit.answer is None


def test_whose_job_meets_the_full_limit_is_refused_and_the_others_begin_again(
    scene: Scene,
) -> None:
    culprit, other = matcher(1.0), matcher(1.0, tokens=(3, 4))
    scene.ask(0, "a", culprit)
    scene.turn()
    scene.ask(1, "b", other)
    scene.lose(0)
    assert culprit.answer == COSTLY
    assert other.answer is None


def test_the_first_death_runs_the_job_again_alone_and_the_second_refuses_it(scene: Scene) -> None:
    """No other matcher is opened where it runs."""
    culprit = matcher(1.0)
    scene.ask(0, "a", culprit)
    scene.turn()
    scene.lose(0, CRASH)
    assert len(scene.requests(1)) == 1
    for number in range(1, 5):
        scene.ask(number, f"b{number}", matcher(1.0, text=str(number)))
    assert scene.requests(1) == []
    assert len(scene.requests(2)) == 1
    scene.lose(1, CRASH)
    assert culprit.answer == COSTLY


def test_a_worker_that_has_others_matchers_is_emptied_for_a_job_that_runs_alone(
    scene: Scene,
) -> None:
    """They are opened elsewhere when they are needed."""
    others = [matcher(1.0, text=text) for text in "xy"]
    for number, one in enumerate(others):
        scene.ask(number, "b", one)
        scene.turn()
    for process in (0, 1):
        scene.mask(process, scene.job(process), 0)
    scene.ask(2, "a", matcher())
    scene.turn()
    scene.lose(2, CRASH)
    assert len(scene.requests(3)) == 1
    assert (scene.process(0).is_over, scene.process(1).is_over) == (True, False)
    others[0].accept(7)
    again = scene.opened(others[0], client="b", process=1)
    assert (again["text"], again["tokens"]) == ("x", [7])


def test_what_has_ended_a_worker_comes_after_the_others_for_a_while(scene: Scene) -> None:
    scene.starts.are_ready = False
    for number, client in enumerate("abcdef"):
        scene.ask(number, client, matcher(1.0, text=client))
    scene.turn()
    scene.process(0).ready()
    (job,) = scene.requests(0)
    assert job["text"] == "a"
    scene.lose(0, CRASH)
    waiting = scene.pool._queue.in_order(scene.now)
    assert [session.client for session in waiting] == list("bcdefa")


def test_after_it_has_run_alone_a_session_is_one_among_others(scene: Scene) -> None:
    culprit = matcher(1.0)
    scene.ask(0, "a", culprit)
    scene.turn()
    scene.lose(0, CRASH)
    (alone,) = scene.requests(1)
    scene.process(1).mask(alone, 0)
    scene.ask(1, "b", matcher(1.0))
    scene.turn()
    (shared,) = scene.requests(1)
    assert shared["id"] != alone["id"]
    assert isinstance(culprit.answer, Allowed)


def test_a_process_that_is_killed_from_outside_is_nobodys_fault(scene: Scene) -> None:
    one = matcher(1.0, tokens=(1, 2, 3))
    scene.ask(0, "a", one)
    for life in range(MOST_FRUITLESS):
        (opened,) = scene.requests(life)
        assert opened["tokens"] == [1, 2, 3]
        assert one.answer is None
        scene.lose(life, OUTSIDE)
    assert one.answer == NOBODY_ANSWERS
    assert len(scene.starts.started) == MOST_FRUITLESS


def test_an_answer_in_between_counts_the_deaths_anew(scene: Scene) -> None:
    one = matcher()
    scene.ask(0, "a", one)
    for life in range(2 * MOST_FRUITLESS):
        (opened,) = scene.requests(life)
        scene.process(life).mask(opened, life)
        scene.lose(life, OUTSIDE)
        assert isinstance(one.answer, Allowed)
        one.accept(life)
        scene.ask(0, "a", one)


def test_a_matcher_is_unanswerable_where_no_process_starts(scene: Scene) -> None:
    scene.starts.is_possible = False
    one = matcher()
    scene.ask(0, "a", one)
    for _ in range(MOST_FRUITLESS):
        scene.turn()
    assert one.answer == NOBODY_ANSWERS
    scene.starts.is_possible = True
    scene.ask(1, "a", matcher())
    scene.turn()
    assert len(scene.requests(0)) == 1


def test_a_long_answer_is_made_again_elsewhere_with_a_jobs_usual_limit(scene: Scene) -> None:
    long = matcher(tokens=tuple(range(2000)))
    long.seconds = 0.5
    scene.ask(0, "a", matcher())
    scene.ask(1, "b", long)
    scene.turn()
    scene.lose(0)
    (again,) = scene.requests(1)
    assert again["seconds"] == SHORT_LIMIT_SECONDS
    assert len(again["tokens"]) == 2000


def test_who_goes_while_his_job_runs_is_blamed_all_the_same(scene: Scene) -> None:
    """His next jobs are kept out of the first worker; those of others begin again there."""
    other = matcher(tokens=(7,))
    scene.ask(0, "b", matcher())
    scene.turn()
    scene.ask(1, "a", other)
    scene.turn()
    scene.end(0)
    scene.lose(0)
    assert [job["tokens"] for job in scene.requests(1)] == [[7]]
    assert other.answer is None
    scene.ask(9, "b", matcher())
    scene.turn()
    (job,) = scene.requests(2)
    assert job["seconds"] == STEP_SECONDS
    scene.process(2).mask(job, 0)
    scene.end()
    scene.mask(1, {"id": 2}, 1)
    scene.requests(1)
    scene.now = USAGE_SECONDS + 1
    scene.ask(10, "b", matcher(text="new"))
    assert [job["text"] for job in scene.requests(1)] == ["new"]


def test_a_job_has_as_long_as_it_takes_on_a_busy_machine(scene: Scene) -> None:
    opened = scene.opened(matcher(1.0))
    scene.now = patience_seconds(opened["seconds"])
    scene.turn()
    assert not scene.process(0).is_over
    scene.now += 1
    scene.turn()
    assert scene.process(0).is_over


def test_whose_job_is_stuck_is_blamed_though_the_daemon_kills_the_process(scene: Scene) -> None:
    culprit = matcher()
    scene.ask(0, "a", culprit)
    for life, limit in enumerate((SHORT_LIMIT_SECONDS, STEP_SECONDS)):
        assert culprit.answer is None
        (opened,) = scene.requests(life)
        assert opened["seconds"] == limit
        scene.now += patience_seconds(limit) + 1
        scene.turn()
    assert culprit.answer == COSTLY


def test_a_process_that_is_never_ready_is_replaced_and_then_given_up(scene: Scene) -> None:
    scene.starts.are_ready = False
    one = matcher()
    scene.ask(0, "a", one)
    for life in range(MOST_FRUITLESS):
        scene.turn()
        assert one.answer is None
        assert scene.process(life).requests() == []
        scene.now += START_SECONDS + 1
        scene.turn()
        assert scene.process(life).is_over
    assert one.answer == NOBODY_ANSWERS


def test_memory_that_the_system_does_not_bound_is_bounded_by_the_daemon(scene: Scene) -> None:
    """On macOS, by a look at the footprint while a job runs."""
    culprit, other = matcher(1.0), matcher(text="other")
    scene.ask(0, "a", culprit)
    scene.turn()
    scene.process(0).footprint = MEMORY_BYTES
    scene.turn()
    assert not scene.process(0).is_over
    for life in (0, 1):
        assert culprit.answer is None
        assert len(scene.requests(life)) == 1
        scene.process(life).footprint = MEMORY_BYTES + 1
        scene.turn()
        assert scene.process(life).is_over
    assert culprit.answer == COSTLY
    scene.ask(1, "b", other)
    scene.turn()
    assert len(scene.requests(2)) == 1


def test_who_holds_the_memory_is_blamed_and_not_whose_job_finds_none(scene: Scene) -> None:
    large, small = matcher(text="x"), matcher(text="x")
    first = scene.opened(large)
    scene.process(0).mask(first, 0, bytes_left=MEMORY // 10)
    scene.ask(1, "b", small)
    assert len(scene.requests(0)) == 1
    scene.lose(0, OUT_OF_MEMORY)
    scene.mask(1, scene.job(1), 0)
    assert isinstance(small.answer, Allowed)
    answer = large.answer
    assert isinstance(answer, Allowed)  # a step may have chosen from it
    large.accept(1)
    scene.ask(0, "a", large)
    scene.turn()
    (alone,) = scene.requests(2)
    assert alone["tokens"] == [1]
    scene.lose(2, OUT_OF_MEMORY)
    assert large.answer == COSTLY


def largest(*begun: tuple[int, str, int], closed: int = 0) -> int | None:
    """The session to blame where the last job of a worker finds no memory. Each: the session, its
    client and what was left before its job. Session `closed` is gone.
    """
    one = WorkerSlot(first_bytes_left=MEMORY, bytes_left=MEMORY)
    grammar = Grammar(GrammarKind.REGEX, "a")
    sessions = {
        number: Session(client, grammar, lambda outcome, draft: None, number=number)
        for number, client, _ in begun
    }
    for number, _, bytes_left in begun:
        if one.jobs:
            one.taken_bytes[one.jobs.popleft().session] += one.bytes_left - bytes_left
        one.bytes_left = bytes_left
        one.jobs.append(Job(sessions[number], False, True, 1.0, 0, None))
    one.sessions = {session for number, session in sessions.items() if number != closed}
    if closed:
        one.taken_bytes.pop(sessions[closed], None)
    found = one.largest()
    return None if found is None else found.number


@pytest.mark.parametrize(
    ("begun", "closed", "to_blame"),
    [
        pytest.param([(1, "a", MEMORY), (2, "b", 200), (3, "c", 100)], 0, 1, id="has taken most"),
        pytest.param([(1, "a", MEMORY), (2, "b", 600)], 0, 2, id="asked for more than is left"),
        pytest.param(
            [(1, "a", MEMORY), (2, "a", 850), (3, "a", 600), (4, "b", 400), (5, "b", 100)],
            0,
            2,
            id="a client's matchers count together",
        ),
        pytest.param(
            [(1, "a", MEMORY), (2, "b", 990), (1, "a", 980), (2, "b", 100)], 0, 1, id="taken later"
        ),
        pytest.param([(1, "a", MEMORY), (2, "b", 100)], 1, None, id="kept of one that is gone"),
        pytest.param([(1, "a", MEMORY)], 1, 1, id="alone, and closed while its job runs"),
    ],
)
def test_where_memory_ends_who_has_taken_most_is_to_blame(
    begun: list[tuple[int, str, int]], closed: int, to_blame: int | None
) -> None:
    assert largest(*begun, closed=closed) == to_blame


def test_a_job_that_runs_for_long_leaves_the_processor_to_others(scene: Scene) -> None:
    scene.ask(0, "a", matcher(1.0))
    scene.turn()
    scene.now = SHORT_LIMIT_SECONDS
    scene.turn()
    assert not scene.process(0).is_in_background
    scene.now += 0.01
    scene.turn()
    assert scene.process(0).is_in_background
