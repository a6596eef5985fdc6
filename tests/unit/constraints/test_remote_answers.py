"""The engine thread's side of grammar processes, which die, are slow and talk nonsense."""

from collections.abc import Iterator

import pytest

from engine.constraints.matcher import Allowed, Complete, Matcher, Refused
from engine.constraints.remote.answers import (
    ALLOWED_SECONDS,
    MOST_STARTS,
    NOBODY_ANSWERS,
    QUICK_LIMIT_SECONDS,
    QUICK_SECONDS,
    SLOW_SECONDS,
    STEP_SECONDS,
    TOO_COSTLY,
    RemoteAnswers,
)
from engine.constraints.remote.process import STUCK_SECONDS
from engine.constraints.remote.wire import Message, Said
from engine.step import SequenceId
from engine.types import Grammar, GrammarKind
from tests.unit.constraints.scripted import OUTSIDE, ScriptedProcess, Starts

BITS = bytes([5, 0, 0, 0])
COSTLY = Refused(TOO_COSTLY)


class Told:
    """The answers under test, a clock that stands still, and what the processes are asked."""

    def __init__(self, exit_code: int | None = None) -> None:
        self.now = 0.0
        self.starts = Starts() if exit_code is None else Starts(exit_code)
        self.seconds: list[float] = []
        self.answers = RemoteAnswers(
            self.starts, self.starts, 1, self.seconds.append, lambda: self.now
        )

    def ask(self, sequence: int, client: str, matcher: Matcher) -> None:
        self.answers.ask(SequenceId(sequence), client, matcher)

    def wait(self) -> None:
        self.answers.wait(lambda: False, 0.0)

    def asked(self, process: int) -> list[Message]:
        self.wait()
        return self.starts.started[process].asked()

    def process(self, number: int) -> ScriptedProcess:
        return self.starts.started[number]


@pytest.fixture
def told() -> Iterator[Told]:
    made = Told()
    yield made
    made.answers.close()
    made.starts.close()


@pytest.fixture
def told_killed() -> Iterator[Told]:
    """Processes are ended from outside."""
    made = Told(OUTSIDE)
    yield made
    made.answers.close()
    made.starts.close()


def matcher(trial_seconds: float = 0.0, tokens: tuple[int, ...] = ()) -> Matcher:
    return Matcher(Grammar(GrammarKind.REGEX, "a"), "regex", trial_seconds, list(tokens))


def test_a_matcher_is_opened_and_then_told_its_tokens(told: Told) -> None:
    one = matcher(tokens=(7,))
    told.ask(0, "a", one)
    told.ask(0, "a", one)
    (opened,) = told.asked(0)
    assert (opened["do"], opened["tokens"], opened["text"]) == ("open", [7], "a")
    assert opened["seconds"] == QUICK_LIMIT_SECONDS
    told.process(0).mask(opened["id"], 1, BITS)
    told.wait()
    answer = one.answer
    assert isinstance(answer, Allowed)
    assert answer.mask.tolist() == [5]
    one.accept(8)
    told.ask(0, "a", one)
    told.ask(0, "a", one)
    (stepped,) = told.asked(0)
    assert (stepped["do"], stepped["id"], stepped["tokens"]) == ("step", opened["id"], [8])
    told.process(0).report(Said.STOPPED, id=opened["id"], n_tokens=2, seconds=0.25)
    told.wait()
    assert one.answer == Complete()
    assert one.seconds == 0.25
    assert len(told.seconds) == 2


def test_an_answer_on_fewer_tokens_counts_for_nothing(told: Told) -> None:
    one = matcher()
    told.ask(0, "a", one)
    (opened,) = told.asked(0)
    one.accept(8)
    told.ask(0, "a", one)
    told.process(0).mask(opened["id"], 0, BITS)
    told.wait()
    assert one.answer is None
    told.process(0).mask(opened["id"], 1, BITS)
    told.wait()
    assert one.answer is not None


def test_an_answer_for_who_has_gone_counts_for_nothing(told: Told) -> None:
    one, other = matcher(), matcher()
    told.ask(0, "a", one)
    told.ask(1, "a", other)
    first, second = told.asked(0)
    told.answers.retain(lambda sequence: sequence == 1)
    assert [said["do"] for said in told.asked(0)] == ["close"]
    told.process(0).mask(first["id"], 0, BITS)
    told.process(0).mask(second["id"], 0, BITS)
    told.wait()
    assert one.answer is None
    assert other.answer is not None


def test_a_sequence_whose_matcher_is_another_now_is_opened_again(told: Told) -> None:
    told.ask(0, "a", matcher())
    told.ask(0, "a", matcher())
    assert [said["do"] for said in told.asked(0)] == ["open", "close", "open"]


def test_who_is_slow_moves_with_all_that_he_waits_for(told: Told) -> None:
    slow, waiting, other = matcher(), matcher(tokens=(1, 2)), matcher()
    for sequence, (client, one) in enumerate([("a", slow), ("a", waiting), ("b", other)]):
        told.ask(sequence, client, one)
    opened = told.asked(0)
    told.process(0).mask(opened[0]["id"], 0, BITS, QUICK_SECONDS + 0.01)
    told.wait()
    assert slow.answer is not None
    assert [said["do"] for said in told.asked(0)] == ["close"]
    (moved,) = told.asked(1)
    assert (moved["tokens"], moved["seconds"]) == ([1, 2], STEP_SECONDS)
    slow.accept(3)
    told.ask(0, "a", slow)
    (again,) = told.asked(1)
    assert (again["do"], again["tokens"]) == ("open", [3])
    told.now = SLOW_SECONDS + 1
    told.ask(5, "a", matcher())
    assert [said["do"] for said in told.asked(0)] == ["close", "open"]
    assert other.answer is None


def test_what_takes_long_to_open_is_never_opened_in_the_quick_process(told: Told) -> None:
    told.ask(0, "a", matcher(trial_seconds=1.0))
    (opened,) = told.asked(0)
    assert opened["seconds"] == STEP_SECONDS + 2.0
    told.ask(1, "b", matcher())
    assert len(told.asked(1)) == 1


def test_whose_job_ends_the_quick_process_has_it_done_by_the_slow_one(told: Told) -> None:
    """Perhaps it was not that job that took all the memory; and the others are not kept waiting."""
    culprit, others, second = matcher(), [matcher(), matcher(tokens=(3, 4))], matcher()
    told.ask(0, "a", culprit)
    told.ask(1, "a", second)
    for sequence, one in enumerate(others):
        told.ask(sequence + 2, "b", one)
    opened = told.asked(0)
    told.process(0).begin(opened[0]["id"])
    told.process(0).die()
    told.wait()
    told.wait()
    again = told.asked(1)
    assert [said["tokens"] for said in again] == [[], [3, 4]]
    assert [said["client"] for said in again] == ["b", "b"]
    assert [said["client"] for said in told.asked(2)] == ["a", "a"]
    assert culprit.answer is None


def test_a_long_answer_is_made_again_in_the_quick_process(told: Told) -> None:
    """Of another client than the one whose job has ended it, and with a job's usual limit."""
    long = matcher(tokens=tuple(range(2000)))
    long.seconds = 0.5
    told.ask(0, "a", matcher())
    told.ask(1, "b", long)
    told.process(0).begin(told.asked(0)[0]["id"])
    told.process(0).die()
    told.wait()
    told.wait()
    (again,) = told.asked(1)
    assert (again["client"], again["seconds"]) == ("b", QUICK_LIMIT_SECONDS)
    assert len(again["tokens"]) == 2000


def test_whose_job_ends_the_slow_process_is_told_so_and_the_others_begin_again(told: Told) -> None:
    culprit, second, other = matcher(1.0), matcher(1.0), matcher(1.0, tokens=(3, 4))
    for sequence, (client, one) in enumerate([("a", culprit), ("a", second), ("b", other)]):
        told.ask(sequence, client, one)
    opened = told.asked(0)
    told.process(0).begin(opened[0]["id"])
    told.process(0).die()
    told.wait()
    told.wait()
    assert culprit.answer == COSTLY
    again = told.asked(1)
    assert [(said["client"], said["tokens"]) for said in again] == [("b", [3, 4]), ("a", [])]


def test_a_process_that_is_killed_from_outside_is_nobodys_fault(told_killed: Told) -> None:
    told, one = told_killed, matcher(1.0, tokens=(1, 2, 3))
    told.ask(0, "a", one)
    for life in range(MOST_STARTS):
        (opened,) = told.asked(life)
        assert opened["tokens"] == [1, 2, 3]
        assert one.answer is None
        told.process(life).begin(opened["id"])
        told.process(life).die()
        told.wait()
        told.wait()
    assert one.answer == NOBODY_ANSWERS
    assert len(told.starts.started) == MOST_STARTS


def test_an_answer_in_between_counts_the_deaths_anew(told_killed: Told) -> None:
    told, one = told_killed, matcher()
    told.ask(0, "a", one)
    for life in range(2 * MOST_STARTS):
        (opened,) = told.asked(life)
        told.process(life).mask(opened["id"], life, BITS)
        told.process(life).die()
        told.wait()
        assert isinstance(one.answer, Allowed)
        told.wait()
        one.accept(life)
        told.ask(0, "a", one)


def test_where_no_process_starts_it_is_said_at_once(told: Told) -> None:
    told.starts.is_possible = False
    one = matcher()
    told.ask(0, "a", one)
    assert one.answer == NOBODY_ANSWERS
    told.starts.is_possible = True
    told.answers.retain(lambda sequence: False)
    two = matcher()
    told.ask(1, "a", two)
    assert len(told.asked(0)) == 1


def test_a_process_that_neither_computes_nor_answers_is_replaced(told: Told) -> None:
    one = matcher()
    told.ask(0, "a", one)
    (opened,) = told.asked(0)
    told.process(0).begin(opened["id"])
    told.wait()
    told.now = STUCK_SECONDS + 1
    told.wait()
    assert told.process(0).is_over
    assert len(told.asked(1)) == 1


@pytest.mark.parametrize(
    ("said", "fields"),
    [
        (Said.STOPPED, {}),
        (Said.STOPPED, {"id": "one", "n_tokens": 0, "seconds": 0.0}),
        (Said.FAILED, {"id": 1, "n_tokens": 0, "seconds": 0.0}),
        (Said.FAILED, {"id": 1, "n_tokens": 0, "seconds": 0.0, "error": {}}),
        (Said.VERDICT, {"error": None, "seconds": 0.0}),
        (Said.BEGUN, {}),
    ],
)
def test_a_process_that_makes_no_sense_is_replaced(told: Told, said: Said, fields: Message) -> None:
    one = matcher()
    told.ask(0, "a", one)
    told.asked(0)
    told.process(0).report(said, **fields)
    told.wait()
    assert len(told.asked(1)) == 1
    assert one.answer is None


def test_a_mask_of_another_length_makes_no_sense(told: Told) -> None:
    told.ask(0, "a", matcher())
    (opened,) = told.asked(0)
    told.process(0).mask(opened["id"], 0, BITS + BITS)
    told.wait()
    assert len(told.asked(1)) == 1


def test_the_masks_of_a_sequence_together_have_a_limit(told: Told) -> None:
    one = matcher()
    one.seconds = ALLOWED_SECONDS
    told.ask(0, "a", one)
    (opened,) = told.asked(0)
    told.process(0).mask(opened["id"], 0, BITS)
    told.wait()
    one.accept(1)
    told.ask(0, "a", one)
    told.asked(0)
    told.process(0).mask(opened["id"], 1, BITS, 0.03)
    told.wait()
    assert one.answer == COSTLY
