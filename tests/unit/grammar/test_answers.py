"""The engine thread's side of the pool: matchers, drafts, and processes that talk nonsense."""

from typing import Any

import pytest

from engine.grammar.answers import ALLOWED_SECONDS, TOO_COSTLY
from engine.grammar.pool import MOST_FRUITLESS
from engine.grammar.queue import SHORT_LIMIT_SECONDS
from engine.grammar.state import Allowed, Complete, Refused, Unanswerable
from engine.grammar.wire import JobReport, ReportKind
from tests.unit.grammar.scripted import BITS, CRASH, MEMORY, Scene, matcher


def test_a_matcher_is_opened_and_then_given_its_tokens(scene: Scene) -> None:
    one = matcher(tokens=(7,))
    scene.ask(0, "a", one)
    opened = scene.opened(one)
    assert (opened["do"], opened["tokens"], opened["text"]) == ("advance", [7], "a")
    assert opened["seconds"] == SHORT_LIMIT_SECONDS
    scene.mask(0, opened, 1)
    answer = one.answer
    assert isinstance(answer, Allowed)
    assert answer.mask.tolist() == [5]
    one.accept(8)
    scene.ask(0, "a", one)
    stepped = scene.opened(one)
    assert (stepped["id"], stepped["tokens"]) == (opened["id"], [8])
    assert "text" not in stepped
    scene.process(0).report(JobReport(ReportKind.COMPLETE, opened["id"], 2, 0.25))
    scene.turn()
    assert one.answer == Complete()
    assert one.seconds == 0.25
    assert len(scene.waited) == 2


def test_an_answer_on_fewer_tokens_counts_for_nothing(scene: Scene) -> None:
    one = matcher()
    opened = scene.opened(one)
    one.accept(8)
    scene.ask(0, "a", one)
    scene.process(0).mask(opened, 0)
    (stepped,) = scene.requests(0)
    assert stepped["tokens"] == [8]
    assert one.answer is None
    scene.mask(0, opened, 1)
    assert one.answer is not None


def test_what_is_left_of_many_tokens_is_sent_for_another_turn(scene: Scene) -> None:
    one = matcher(tokens=(1, 2, 3))
    opened = scene.opened(one)
    scene.process(0).report(JobReport(ReportKind.ADVANCED, opened["id"], 2, 0.01))
    (rest,) = scene.requests(0)
    assert rest["tokens"] == [3]
    assert "text" not in rest
    scene.mask(0, rest, 3)
    assert isinstance(one.answer, Allowed)


def test_an_answer_for_who_has_gone_counts_for_nothing(scene: Scene) -> None:
    one, other = matcher(), matcher()
    scene.ask(0, "a", one)
    scene.ask(1, "a", other)
    first, second = scene.requests(0)
    scene.end(0)
    assert [job["do"] for job in scene.requests(0)] == ["close"]
    scene.process(0).mask(first, 0)
    scene.mask(0, second, 0)
    assert one.answer is None
    assert other.answer is not None


def test_a_sequence_whose_matcher_is_another_now_is_opened_again(scene: Scene) -> None:
    first = scene.opened(matcher(text="x"))
    scene.ask(0, "a", matcher(text="y"))
    closed, opened = scene.requests(0)
    assert (closed["do"], closed["id"]) == ("close", first["id"])
    assert opened["text"] == "y"


NONSENSE: list[dict[str, Any]] = [
    {"kind": ReportKind.COMPLETE, "number": 99},
    {"kind": ReportKind.VERDICT},
    {"kind": ReportKind.READY},
    {"kind": ReportKind.MASK, "mask": BITS + BITS},
    {"kind": ReportKind.MASK, "mask": BITS, "forced": (32,)},
    {"kind": ReportKind.MASK, "mask": BITS, "draft_masks": BITS + b"1"},
    {"kind": ReportKind.MASK, "mask": BITS, "n_tokens": 1},
]


@pytest.mark.parametrize("fields", NONSENSE)
def test_a_process_that_makes_no_sense_is_replaced(scene: Scene, fields: dict[str, Any]) -> None:
    one = matcher()
    opened = scene.opened(one)
    scene.process(0).report(JobReport(**{"number": opened["id"], "bytes_left": MEMORY, **fields}))
    scene.turn()
    assert scene.process(0).is_over
    assert len(scene.requests(1)) == 1
    assert one.answer is None


def test_a_grammar_that_cannot_be_followed_is_refused_with_its_reason(scene: Scene) -> None:
    one = matcher(tokens=(1, 2))
    opened = scene.opened(one)
    scene.process(0).report(JobReport(ReportKind.FAILED, opened["id"], 1, error="no"))
    scene.turn()
    assert one.answer == Refused("no")


def test_the_masks_of_a_sequence_together_have_a_limit(scene: Scene) -> None:
    one = matcher()
    one.seconds = ALLOWED_SECONDS
    opened = scene.opened(one)
    scene.mask(0, opened, 0, 0.04)
    answer = one.answer
    assert isinstance(answer, Allowed), "what opening takes does not count"
    one.accept(1)
    scene.ask(0, "a", one)
    scene.turn()
    scene.mask(0, opened, 1, 0.03)
    assert one.answer == Refused(TOO_COSTLY)


def test_a_draft_is_followed_after_its_matchers_tokens(scene: Scene) -> None:
    one = matcher(tokens=(7,))
    question = scene.look_ahead(0, "a", one, 8, 9)
    (job,) = scene.requests(0)
    assert (job["tokens"], job["draft"]) == ([7], [8, 9])
    scene.mask(0, job, 1, forced=(8,), draft_masks=BITS, draft_seconds=0.25, is_draft_complete=True)
    assert isinstance(one.answer, Allowed)
    assert one.answer.forced == (8,)
    match question.answers:
        case (Allowed(mask=mask), Complete()):
            assert mask.tolist() == [5]
        case other:
            raise AssertionError(other)
    assert (one.seconds, one.draft_seconds) == (0.0, 0.25)
    assert len(scene.waited) == 1


def test_a_draft_of_an_answered_matcher_asks_for_no_mask_again(scene: Scene) -> None:
    one = matcher()
    scene.mask(0, scene.opened(one), 0)
    answer, question = one.answer, scene.look_ahead(0, "a", one, 8)
    (job,) = scene.requests(0)
    assert (job["tokens"], job["draft"]) == ([], [8])
    scene.process(0).report(JobReport(ReportKind.ADVANCED, job["id"], 0, draft_masks=BITS))
    scene.turn()
    assert question.answers is not None
    assert one.answer is answer
    assert len(scene.waited) == 1, "what drafts take is no mask that a row waited for"


def test_a_matcher_knows_what_was_found_out_along_a_draft_that_comes_true(scene: Scene) -> None:
    one = matcher()
    one.ahead = scene.look_ahead(0, "a", one, 8, 9)
    scene.mask(0, scene.job(0), 0, draft_masks=BITS + BITS)
    one.accept(8)
    assert isinstance(one.answer, Allowed)
    one.accept(5)
    assert one.answer is None
    stepped = scene.opened(one)
    assert stepped["tokens"] == [8, 5]


def test_only_the_last_draft_of_a_sequence_is_answered(scene: Scene) -> None:
    one = matcher()
    first = scene.look_ahead(0, "a", one, 8)
    (early,) = scene.requests(0)
    second = scene.look_ahead(0, "a", one, 9)
    assert first.answers == ()
    scene.process(0).mask(early, 0, draft_masks=BITS)
    (late,) = scene.requests(0)
    assert second.answers is None
    assert late["draft"] == [9]
    scene.process(0).report(JobReport(ReportKind.ADVANCED, late["id"], 0, draft_masks=BITS))
    scene.turn()
    assert second.answers is not None
    assert len(second.answers) == 1


def test_a_draft_that_no_token_of_concerns_the_grammar_asks_for_its_matcher_alone(
    scene: Scene,
) -> None:
    question = scene.look_ahead(0, "a", matcher())
    assert question.answers == ()
    (job,) = scene.requests(0)
    assert job["draft"] == []


def test_a_draft_of_who_has_gone_is_given_up(scene: Scene) -> None:
    question = scene.look_ahead(0, "a", matcher(), 8)
    scene.end()
    assert question.answers == ()


def test_a_draft_that_ends_a_worker_refuses_nobody_and_is_the_last(scene: Scene) -> None:
    one = matcher(trial_seconds=1.0)
    question = scene.look_ahead(0, "a", one, 8)
    scene.turn()
    scene.lose(0)
    assert question.answers == ()
    assert scene.look_ahead(0, "a", one, 8).answers == ()
    for life in (1, 2):
        assert one.answer is None
        (again,) = scene.requests(life)
        assert again["draft"] == []
        scene.lose(life, CRASH)
    assert one.answer == Refused(TOO_COSTLY), "without a draft it is the grammar"


def test_an_answer_that_a_step_may_have_chosen_from_stays(scene: Scene) -> None:
    """The worker dies, and the one that opens the matcher for its next draft fails."""
    one = matcher()
    scene.mask(0, scene.opened(one), 0)
    answer = one.answer
    scene.lose(0)
    scene.look_ahead(0, "a", one, 8)
    (again,) = scene.requests(1)
    scene.process(1).report(JobReport(ReportKind.FAILED, again["id"], 0, error="no"))
    scene.turn()
    assert one.answer is answer
    assert isinstance(answer, Allowed)


def test_after_a_draft_that_ends_a_worker_an_answered_matcher_asks_for_nothing(
    scene: Scene,
) -> None:
    one = matcher(trial_seconds=1.0)
    scene.mask(0, scene.opened(one), 0)
    scene.look_ahead(0, "a", one, 8)
    scene.turn()
    scene.lose(0)
    assert len(scene.starts.started) == 1
    one.accept(9)
    scene.ask(0, "a", one)
    assert [job["tokens"] for job in scene.requests(1)] == [[9]]


def test_drafts_of_a_sequence_together_have_a_limit_that_refuses_nobody(scene: Scene) -> None:
    one = matcher()
    scene.look_ahead(0, "a", one, 8)
    scene.mask(0, scene.job(0), 0, draft_masks=BITS, draft_seconds=ALLOWED_SECONDS + 0.01)
    assert isinstance(one.answer, Allowed)
    assert scene.look_ahead(0, "a", one, 8).answers == ()


def test_a_draft_is_given_up_where_no_process_can_be_started(scene: Scene) -> None:
    scene.starts.is_possible = False
    one = matcher()
    question = scene.look_ahead(0, "a", one, 8)
    for _ in range(MOST_FRUITLESS):
        scene.turn()
    assert question.answers == ()
    assert isinstance(one.answer, Unanswerable)
