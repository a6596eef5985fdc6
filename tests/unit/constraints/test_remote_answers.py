"""The engine thread's side of grammar processes, which answer, are slow and talk nonsense."""

import pytest

from engine.constraints.matcher import Allowed, Complete, Refused
from engine.constraints.remote.answers import (
    ALLOWED_SECONDS,
    QUICK_LIMIT_SECONDS,
    QUICK_SECONDS,
    SLOW_SECONDS,
    STEP_SECONDS,
    TOO_COSTLY,
)
from engine.constraints.remote.wire import Message, Said
from tests.unit.constraints.told import BITS, Told, matcher


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
    assert other.answer is None
    for process, job in ((0, opened[2]), (1, moved), (1, again)):
        told.process(process).mask(job["id"], len(job["tokens"]), BITS)
    told.wait()
    told.now = SLOW_SECONDS + 1
    told.ask(5, "a", matcher())
    assert [said["do"] for said in told.asked(0)] == ["close", "open"]


def test_what_takes_long_to_open_is_never_opened_in_the_quick_process(told: Told) -> None:
    told.ask(0, "a", matcher(trial_seconds=1.0))
    (opened,) = told.asked(0)
    assert opened["seconds"] == STEP_SECONDS + 2.0
    told.ask(1, "b", matcher())
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
    assert one.answer == Refused(TOO_COSTLY)
