"""The engine thread's side of grammar processes, which answer, are slow and talk nonsense."""

import select

import pytest

from engine.core.step import SequenceId
from engine.grammar.matcher import (
    Allowed,
    Complete,
    LookAhead,
    Matcher,
    Refused,
    Unanswerable,
)
from engine.grammar.remote.answers import (
    ALLOWED_SECONDS,
    CHECK_SECONDS,
    MOST_STARTS,
    QUICK_LIMIT_SECONDS,
    QUICK_SECONDS,
    SLOW_SECONDS,
    STEP_SECONDS,
    TOO_COSTLY,
)
from engine.grammar.remote.wire import Message, Said
from tests.unit.grammar.told import BITS, Told, matcher


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


def drafted(told: Told, one: Matcher, *tokens: int) -> LookAhead:
    question = LookAhead(one, tokens)
    told.answers.look_ahead(SequenceId(0), "a", question)
    return question


def test_a_draft_is_asked_about_behind_its_matcher(told: Told) -> None:
    one = matcher(tokens=(7,))
    question = drafted(told, one, 8, 9)
    opened, asked = told.asked(0)
    assert (opened["do"], opened["tokens"]) == ("open", [7])
    assert (asked["do"], asked["id"], asked["tokens"]) == ("ahead", opened["id"], [8, 9])
    assert asked["seconds"] == QUICK_LIMIT_SECONDS
    told.process(0).mask(opened["id"], 1, BITS, forced=(8,))
    told.wait()
    assert isinstance(one.answer, Allowed)
    assert one.answer.forced == (8,)
    assert question.answers is None
    told.process(0).ahead(asked, BITS, 0.25, is_complete=True)
    told.wait()
    match question.answers:
        case (Allowed(mask=mask), Complete()):
            assert mask.tolist() == [5]
        case other:
            raise AssertionError(other)
    assert (one.seconds, one.draft_seconds) == (0.0, 0.25)
    assert len(told.seconds) == 1, "what drafts take is no mask that a row waited for"


def test_a_matcher_knows_what_was_found_out_along_a_draft_that_comes_true(told: Told) -> None:
    one = matcher()
    one.ahead = drafted(told, one, 8, 9)
    _, asked = told.asked(0)
    told.process(0).ahead(asked, BITS + BITS)
    told.wait()
    one.accept(8)
    assert isinstance(one.answer, Allowed)
    one.accept(5)
    assert one.answer is None
    told.ask(0, "a", one)
    (stepped,) = told.asked(0)
    assert stepped["tokens"] == [8, 5]


def test_only_the_last_draft_of_a_sequence_is_answered(told: Told) -> None:
    one = matcher()
    first, second = drafted(told, one, 8), drafted(told, one, 9)
    assert first.answers == ()
    _, early, late = told.asked(0)
    told.process(0).ahead(early, BITS)
    told.wait()
    assert second.answers is None
    told.process(0).ahead(late, BITS)
    told.wait()
    assert second.answers is not None
    assert len(second.answers) == 1


def test_a_draft_that_no_token_of_concerns_the_grammar_asks_for_its_matcher_alone(
    told: Told,
) -> None:
    question = drafted(told, matcher())
    assert question.answers == ()
    assert [said["do"] for said in told.asked(0)] == ["open"]


def test_a_draft_of_who_has_gone_is_given_up(told: Told) -> None:
    question = drafted(told, matcher(), 8)
    told.answers.retain(lambda sequence: False)
    assert question.answers == ()


def test_masks_of_another_length_make_no_sense_along_a_draft(told: Told) -> None:
    question = drafted(told, matcher(), 8)
    _, asked = told.asked(0)
    told.process(0).ahead(asked, BITS + b"1")
    told.wait()
    assert question.answers == ()
    assert [said["do"] for said in told.asked(1)] == ["open"], "the draft is not asked about again"


def test_tokens_that_no_mask_has_make_no_sense(told: Told) -> None:
    told.ask(0, "a", matcher())
    (opened,) = told.asked(0)
    told.process(0).mask(opened["id"], 0, BITS, forced=(32,))
    told.wait()
    assert len(told.asked(1)) == 1


def test_a_draft_that_keeps_others_waiting_moves_its_client(told: Told) -> None:
    one = matcher()
    drafted(told, one, 8)
    opened, asked = told.asked(0)
    told.process(0).mask(opened["id"], 0, BITS)
    told.process(0).ahead(asked, b"", QUICK_SECONDS + 0.01)
    told.wait()
    drafted(told, one, 8)
    assert [said["do"] for said in told.asked(1)] == ["open", "ahead"]


def test_a_draft_that_ends_a_process_refuses_nobody_and_is_the_last(told: Told) -> None:
    one = matcher(trial_seconds=1.0)
    question = drafted(told, one, 8)
    _, asked = told.asked(0)
    told.lose(0, asked)
    assert question.answers == ()
    assert one.refusal is None
    assert drafted(told, one, 8).answers == ()
    (again,) = told.asked(1)
    assert again["do"] == "open"
    told.lose(1, again)
    assert one.answer == Refused(TOO_COSTLY), "without a draft it is the grammar"


def test_drafts_of_a_sequence_together_have_a_limit_that_refuses_nobody(told: Told) -> None:
    one = matcher()
    drafted(told, one, 8)
    opened, asked = told.asked(0)
    told.process(0).mask(opened["id"], 0, BITS)
    told.process(0).ahead(asked, BITS, ALLOWED_SECONDS + 0.01)
    told.wait()
    assert isinstance(one.answer, Allowed)
    assert drafted(told, one, 8).answers == ()


def test_a_draft_is_given_up_where_no_process_can_be_started(told: Told) -> None:
    told.starts.is_possible = False
    one = matcher()
    question = drafted(told, one, 8)
    for _ in range(MOST_STARTS):
        told.wait()
    assert question.answers == ()
    assert isinstance(one.answer, Unanswerable)


class Poll:
    """Stands for `select.poll`: no socket ever has anything, and no time passes."""

    def __init__(self) -> None:
        self.events = list[int]()
        self.waits_ms = list[float]()

    def register(self, connection: object, events: int) -> None:
        self.events.append(events)

    def poll(self, timeout_ms: float) -> None:
        self.waits_ms.append(timeout_ms)


def test_a_kernel_without_buffers_does_not_make_the_engine_thread_spin(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BSD kernels answer ENOBUFS, and call the socket writable all the same."""
    sends = list[int]()

    def nothing_sent(connection: object, data: bytes) -> int:
        sends.append(len(data))
        return 0

    monkeypatch.setattr("engine.grammar.remote.lane.send_some", nothing_sent)
    poll = Poll()
    monkeypatch.setattr("select.poll", lambda: poll)
    told.ask(0, "a", matcher())
    told.answers.wait(lambda: len(sends) == 3, 1.0)
    assert poll.waits_ms == [1e3 * CHECK_SECONDS] * 2
    assert set(poll.events) == {select.POLLIN}
