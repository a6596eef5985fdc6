"""Sequences that are preempted and admitted again while their row of an earlier step is in flight.

That takes a pinned prefix: a plan that finds nothing to run unpins it and plans once more, and the
second plan may admit what the first one has preempted.
"""

from collections.abc import Callable
from dataclasses import replace
from random import Random

from engine.core.inbox import Inbox
from engine.core.loop import EngineLoop
from engine.core.sequence import LiveSequence, Step
from engine.grammar.answers import Verdict
from engine.grammar.phases import grammar_plan
from engine.grammar.stage import GrammarStage
from engine.grammar.state import GrammarPlan, GrammarState
from engine.values.request import Constraint, Grammar, GrammarKind, Request
from kvstore import invariants
from kvstore.sizes import StorageBytes
from tests.unit.engine_harness import Harness, prompt
from tests.unit.test_loop import Answers

OnReadmitted = Callable[[LiveSequence, Step], None]

BLOCK_SIZE = 4
N_BLOCKS = 16
ANSWER_TOKENS = 56  # with its prompt of a block, the answer nearly fills the arena
GUIDED = Constraint(Grammar(GrammarKind.REGEX, "a*"), "guided_regex")


def guided_plan(request: Request) -> GrammarPlan:
    """The grammar plan of the request, if it had the constraint GUIDED."""
    trial = {GUIDED.grammar: Verdict(None, 0.0)}
    plan = grammar_plan(replace(request, constraint=GUIDED), trial, end_tokens=())
    assert plan is not None
    return plan


def alone(tokens: list[int], max_tokens: int) -> list[int]:
    """The tokens that are generated where nothing else is served."""
    harness = Harness(n_blocks=64, block_size=BLOCK_SIZE, step_tokens=64)
    return harness.output(harness.serve(tokens, max_tokens))


class Machine:
    """An engine's loop, turned by hand, over a small arena with a pinned prompt. A long answer is
    generated, with overlapped steps.

    `on_readmitted` is called, with the sequence and the step in flight, when a plan admits a
    sequence whose row is in flight.
    """

    def __init__(self, on_readmitted: OnReadmitted, pinned_tokens: int = 16) -> None:
        harness = self.harness = Harness(N_BLOCKS, BLOCK_SIZE, step_tokens=64)
        harness.serve(prompt(5, pinned_tokens), 0, is_background=True, pin=True)
        self.answer = harness.add(prompt(1, BLOCK_SIZE), ANSWER_TOKENS, client="a")
        storage = StorageBytes(0, (), 0)
        self.loop = EngineLoop(harness.scheduler, harness.runner, Inbox(), harness.take, storage)
        self._plan = harness.scheduler.plan
        self._on_readmitted = on_readmitted
        harness.scheduler.plan = self._watched_plan  # type: ignore[method-assign]

    def serve(self, long_tokens: int, n_turns: int) -> str:
        """After `n_turns`, add a prompt of `long_tokens`, and serve all. Return its request."""
        for _ in range(n_turns):
            self.loop.turn()
        other = self.harness.add(prompt(2, long_tokens), 4, client="b")
        for _ in range(500):
            if self.loop.is_idle:
                break
            self.loop.turn()
            invariants.check(self.harness.store)
        invariants.check_idle(self.harness.store)
        return other

    def _watched_plan(self) -> Step | None:
        before, step = self.loop.in_flight, self._plan()
        if before is not None and step is not None:
            entering = {entry.sequence_id for entry in step.plan.enter}
            for sequence in [planned.sequence for planned in before.rows]:
                if sequence.id in entering:
                    self._on_readmitted(sequence, before)
        return step


def serve_together(pinned_tokens: int, long_tokens: int, n_turns: int) -> int:
    """Serve a long answer and, `n_turns` later, a prompt of `long_tokens`. Both must generate what
    they do alone. Return how many sequences were admitted while their row was in flight.
    """
    readmitted = list[LiveSequence]()
    machine = Machine(lambda sequence, before: readmitted.append(sequence), pinned_tokens)
    other = machine.serve(long_tokens, n_turns)
    output = machine.harness.output
    assert output(machine.answer) == alone(prompt(1, BLOCK_SIZE), ANSWER_TOKENS)
    assert output(other) == alone(prompt(2, long_tokens), 4)
    return len(readmitted)


def test_the_result_of_an_earlier_lease_is_ignored() -> None:
    assert serve_together(pinned_tokens=16, long_tokens=50, n_turns=6) > 0


def test_texts_next_to_pinned_prefixes_are_those_of_requests_alone() -> None:
    random = Random(65)
    drawn = [
        (BLOCK_SIZE * random.randint(1, 4), random.randint(20, 60), random.randint(2, 40))
        for _ in range(60)
    ]
    assert sum(serve_together(*each) for each in drawn) > 0


def test_a_failed_step_does_not_end_a_sequence_that_was_readmitted_since() -> None:
    lives = list[bool]()

    def fail(sequence: LiveSequence, before: Step) -> None:
        machine.harness.scheduler.failed_steps.fail(before, "the step failed")
        lives.append(sequence.is_live and sequence.lease is not None)

    machine = Machine(fail)
    machine.serve(long_tokens=50, n_turns=6)
    assert lives == [True]


def test_a_late_mask_of_an_earlier_lease_changes_nothing() -> None:
    changes = list[tuple[object, object]]()

    def ask_masks(sequence: LiveSequence, before: Step) -> None:
        state = GrammarState(guided_plan(sequence.request))
        pending, sequence.grammar = sequence.pending, state
        stage = GrammarStage(machine.harness.scheduler, Answers(None, [0.0]), lambda: 0.0)
        changes.append((list(stage.masks(before, 1.0).late), sequence.pending is pending))
        sequence.grammar = None

    machine = Machine(ask_masks)
    machine.serve(long_tokens=50, n_turns=6)
    assert changes == [([], True)]
