"""Rows whose grammars are read elsewhere: what is waited for, how long, and what is told."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from unittest.mock import Mock

import numpy as np
import pytest

from engine.core.inbox import Inbox
from engine.core.loop import EngineLoop
from engine.core.step import Prefill, SequenceId, StepMasks, StepPlan, StepResult, Verify
from engine.grammar.answers import MatcherAnswers, Verdict
from engine.grammar.phases import grammar_plan
from engine.grammar.stage import MASK_WAIT_IDLE_SECONDS, SAMPLE_SHARE, GrammarStage, mask_words
from engine.grammar.state import Allowed, Answer, LookAhead, Matcher, Refused, Unanswerable
from engine.values.output import FinishReason, OutputEvent
from engine.values.request import Constraint, Grammar, GrammarKind, Request, SamplingParams
from engine.values.tokens import pack
from kvstore.sizes import StorageBytes
from tests.simulation.fake_runner import FakeRunner
from tests.unit.engine_harness import VOCAB_SIZE, Harness, prompt
from tests.unit.scripted_drafter import ScriptedDrafter

ANYTHING = Allowed(np.full(mask_words(VOCAB_SIZE), -1, dtype=np.int32))
NOBODY = Unanswerable("nobody can say")
HELD = Constraint(Grammar(GrammarKind.REGEX, "a*"), "guided_regex")
DISPENSABLE = replace(HELD, weaker=(None,))


@dataclass
class Answers(MatcherAnswers):
    """Answers at once, or when a test says so. A wait takes as long as it may."""

    at_once: Answer | None
    clock: list[float]
    waits: list[float] = field(default_factory=list)
    asked: list[Matcher] = field(default_factory=list)
    ahead: Callable[[LookAhead], tuple[Allowed, ...] | None] = lambda question: None
    n_words: int = mask_words(VOCAB_SIZE)

    def ask(self, sequence: SequenceId, client: str, matcher: Matcher) -> None:
        matcher.answer = self.at_once
        self.asked.append(matcher)

    def look_ahead(self, sequence: SequenceId, client: str, question: LookAhead) -> None:
        if question.matcher.answer is None:
            self.ask(sequence, client, question.matcher)
        question.answers = self.ahead(question)

    def retain(self, is_live: Callable[[SequenceId], bool]) -> None: ...

    def wait(self, is_enough: Callable[[], bool], seconds: float) -> None:
        self.waits.append(seconds)
        self.clock[0] += 0.0 if is_enough() else seconds

    def close(self) -> None: ...


class SlowRunner:
    """A fake runner whose steps take a second of the clock. `plan` is the plan of the last turn."""

    def __init__(self, runner: FakeRunner, clock: list[float]) -> None:
        self._runner = runner
        self._clock = clock
        self.plan: StepPlan | None = None

    def submit(self, plan: StepPlan) -> None:
        self.plan = plan
        self._runner.submit(plan)

    def launch(self) -> None:
        self._runner.launch()

    def draw(self, masks: StepMasks) -> None:
        self._clock[0] += 1.0
        self._runner.draw(masks)

    def collect(self) -> StepResult:
        return self._runner.collect()


class LoopHarness:
    """An engine's loop, turned by hand. A step takes a second of its clock."""

    def __init__(self, at_once: Answer | None) -> None:
        self.clock = [0.0]
        self.harness = Harness(step_tokens=8, max_running=8, clock=lambda: self.clock[0])
        self.answers = Answers(at_once, self.clock)
        self.scheduler = self.harness.scheduler
        self.runner = SlowRunner(self.harness.runner, self.clock)
        self.events: list[OutputEvent] = []
        self.loop = EngineLoop(
            self.scheduler,
            self.runner,
            Inbox(),
            self.events.extend,
            StorageBytes(block=0, slots=(), arenas=0),
            GrammarStage(self.scheduler, self.answers, self.scheduler.metrics.now),
        )

    def ask(
        self, name: str, n_tokens: int, max_tokens: int, constraint: Constraint | None = HELD
    ) -> None:
        request = Request(
            name,
            pack(prompt(1, n_tokens)),
            max_tokens,
            SamplingParams(seed=3),
            constraint=constraint,
        )
        verdicts = {} if constraint is None else {constraint.grammar: Verdict(None, 0.0)}
        plan = grammar_plan(request, verdicts, end_tokens=())
        self.scheduler.add(self.scheduler.prepare(request, plan), self.clock[0])

    def turn(self) -> StepPlan | None:
        """The plan that was submitted; None where no step was due."""
        self.runner.plan = None
        if not self.loop.is_idle:
            self.loop.turn()
        return self.runner.plan


@pytest.fixture
def late() -> LoopHarness:
    """Nobody knows what may follow."""
    return LoopHarness(None)


def test_a_refusal_that_is_known_when_it_is_asked_is_told() -> None:
    harness = LoopHarness(NOBODY)
    harness.ask("held", 5, 4)
    for _ in range(3):
        harness.turn()
    (event,) = [event for event in harness.events if event.finish_reason]
    assert event.finish_reason is FinishReason.ERROR
    assert event.error == "guided_regex: nobody can say"


@pytest.mark.parametrize("answer", [NOBODY, Refused("too costly")])
@pytest.mark.parametrize("n_followed", [0, 2])
def test_a_dispensable_grammar_that_fails_leaves_its_answer_free(
    late: LoopHarness, answer: Answer, n_followed: int
) -> None:
    """It fails at its first token, or after it has been followed for a while."""
    late.answers.at_once = ANYTHING if n_followed else answer
    late.ask("held", 5, 6, DISPENSABLE)
    while sum(len(event.token_ids) for event in late.events) < n_followed:
        late.turn()
    late.answers.at_once = answer
    while late.scheduler.has_work:
        late.turn()
    assert [event.error for event in late.events if event.error] == []
    assert [event.finish_reason for event in late.events][-1] is FinishReason.LENGTH
    assert sum(len(event.token_ids) for event in late.events) == 6


def test_the_first_question_of_a_sequence_leaves_before_the_step_in_flight_is_awaited(
    late: LoopHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    late.ask("free", 5, 9, constraint=None)
    late.turn()
    late.turn()
    late.ask("held", 5, 4)
    runner, at_collect = late.runner, list[tuple[int, list[float]]]()
    collect = runner.collect

    def collected() -> StepResult:
        at_collect.append((len(late.answers.asked), late.answers.waits.copy()))
        return collect()

    monkeypatch.setattr(runner, "collect", collected)
    late.answers.waits.clear()
    late.turn()
    assert at_collect == [(1, [0.0])]


def test_streams_without_grammars_never_call_for_answers(
    late: LoopHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So no process starts for them either: the first session starts the pool."""

    def called(*arguments: object) -> None:
        raise AssertionError("a grammar that nobody has asked for")

    for name in ("ask", "look_ahead", "retain", "wait"):
        monkeypatch.setattr(late.answers, name, called)
    for name in ("one", "two"):
        late.ask(name, 5, 9, constraint=None)
    while late.turn() is not None:
        pass
    assert sum(event.finish_reason is FinishReason.LENGTH for event in late.events) == 2


def test_whoever_has_said_all_computes_nothing_while_the_last_token_is_unread(
    late: LoopHarness,
) -> None:
    late.answers.at_once = ANYTHING
    late.ask("held", 5, 2)
    late.turn()
    late.turn()
    late.answers.at_once = None
    while late.turn() is not None:
        pass
    (row,) = late.scheduler.running
    assert (row.output_tokens, row.pending_token is not None) == (2, True)
    assert row.planned_tokens == 6
    late.answers.asked[-1].answer = ANYTHING
    late.turn()
    assert [event.finish_reason for event in late.events][-1] is FinishReason.LENGTH
    assert not late.scheduler.has_work


def test_beside_a_prompt_of_another_s_nobody_waits_for_a_row_alone(late: LoopHarness) -> None:
    late.ask("held", 5, 4)
    late.turn()
    late.turn()
    late.ask("free", 40, 1, constraint=None)
    late.answers.waits.clear()
    while (plan := late.turn()) is not None:
        if any(isinstance(row, Prefill) and row.samples for row in plan.rows):
            break
        assert max(late.answers.waits) <= SAMPLE_SHARE


def test_where_nothing_else_is_computed_a_row_is_waited_for(late: LoopHarness) -> None:
    late.ask("held", 5, 4)
    late.turn()
    late.turn()
    assert late.answers.waits[-1] == MASK_WAIT_IDLE_SECONDS


def test_what_was_waited_is_no_part_of_the_next_wait(late: LoopHarness) -> None:
    late.ask("held", 5, 4)
    late.ask("free", 5, 90, constraint=None)
    for _ in range(40):
        late.turn()
    assert max(late.answers.waits) == pytest.approx(SAMPLE_SHARE)


def test_a_step_that_has_mostly_waited_teaches_nothing(late: LoopHarness) -> None:
    late.ask("held", 5, 4)
    took = Mock()
    late.scheduler.observe = took  # type: ignore[method-assign]
    late.turn()
    late.turn()
    took.assert_called_once()
    late.clock[0] -= 1 - MASK_WAIT_IDLE_SECONDS / 2  # this step takes half of what is waited
    late.turn()
    took.assert_called_once()


class TestGuidedDrafts:
    """Of a grammar that allows anything."""

    N_TOKENS = 30

    def said(
        self, script: Sequence[int], ahead: Callable[[LookAhead], tuple[Allowed, ...] | None]
    ) -> tuple[list[int], LoopHarness]:
        harness = LoopHarness(ANYTHING)
        harness.answers.ahead = ahead
        harness.ask("held", 5, self.N_TOKENS)
        harness.harness.speculate("held", ScriptedDrafter(script))
        for _ in range(2 * self.N_TOKENS):
            harness.turn()
        return [token for event in harness.events for token in event.token_ids], harness

    @pytest.fixture
    def truth(self) -> list[int]:
        said, harness = self.said([], lambda question: None)
        assert len(harness.answers.asked) >= self.N_TOKENS
        return said

    def test_masks_are_asked_for_along_a_draft_and_for_the_last_token(
        self, truth: list[int]
    ) -> None:
        said, harness = self.said(truth, lambda question: (ANYTHING,) * len(question.tokens))
        assert said == truth
        assert len(harness.answers.asked) < self.N_TOKENS // 2

    def test_what_is_not_known_in_time_costs_the_drafts_alone(self, truth: list[int]) -> None:
        said, harness = self.said(truth, lambda question: None)
        assert said == truth
        assert max(harness.answers.waits) <= SAMPLE_SHARE
        assert 0.0 in harness.answers.waits, "what is asked leaves while the device computes"
        usages = [event.usage for event in harness.events if event.usage is not None]
        assert not any(usage.accepted_draft_tokens for usage in usages)

    def test_as_much_of_a_draft_is_verified_as_is_known(self, truth: list[int]) -> None:
        said, harness = self.said(truth, lambda question: (ANYTHING,))
        assert said == truth
        assert len(harness.answers.asked) > self.N_TOKENS // 3


class TestDrafts:
    """What is generated without drafts, from a prompt of five tokens, is the first one's script."""

    N_TOKENS = 30

    def plans(self, script: Sequence[int]) -> tuple[list[StepPlan], list[int]]:
        """Of a request with such a drafter, and what it has generated."""
        harness = LoopHarness(None)
        harness.ask("free", 5, self.N_TOKENS, constraint=None)
        harness.harness.speculate("free", ScriptedDrafter(script))
        plans = [harness.turn() for _ in range(2 * self.N_TOKENS)]
        return [plan for plan in plans if plan is not None], [
            token for event in harness.events for token in event.token_ids
        ]

    def test_steps_overlap_until_a_draft_is_due(self) -> None:
        plain, truth = self.plans([])
        assert len(plain) == self.N_TOKENS
        drafted, said = self.plans(truth)
        assert said == truth
        assert any(isinstance(row, Verify) for plan in drafted for row in plan.rows)
        assert len(drafted) < self.N_TOKENS // 2

    def test_a_draft_goes_on_from_the_last_token(self) -> None:
        _, truth = self.plans([])
        wrong = [token if at % 7 else token + 1 for at, token in enumerate(truth)]
        drafted, said = self.plans(wrong)
        assert said == truth
        for plan in drafted:
            for row in plan.rows:
                if isinstance(row, Verify):
                    assert row.token == truth[row.start - 5]
