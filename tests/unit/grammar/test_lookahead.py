"""What is known of a draft's masks when its grammar is complete within it, or before it."""

import numpy as np
import pytest

from engine.grammar.answers import Verdict
from engine.grammar.phases import grammar_plan
from engine.grammar.stage import GuidedDraft
from engine.grammar.state import Allowed, Complete, GrammarChoice, GrammarState
from engine.values.request import (
    Alternative,
    Constraint,
    Grammar,
    GrammarKind,
    Request,
    ThinkingBudget,
)
from engine.values.tokens import pack

MARKER, FREE, END_OF_THINKING = 7, 5, 8
GRAMMAR = Grammar(GrammarKind.REGEX, "a*")
ALLOWED = Allowed(np.full(1, -1, dtype=np.int32))


def state_of(request: Request) -> GrammarState:
    """A state that has accepted no tokens."""
    plan = grammar_plan(request, {GRAMMAR: Verdict(None, 0.0)}, end_tokens=())
    assert plan is not None
    return GrammarState(plan)


@pytest.fixture
def state() -> GrammarState:
    """A state after the marker of a call. A call may come again, or free text in its place."""
    constraint = Constraint(
        GRAMMAR, "tools", behind=(MARKER,), repeats=True, instead=Alternative(FREE)
    )
    state = state_of(Request("r", pack((1,)), 100, constraint=constraint))
    state.accept(MARKER)
    return state


def test_a_draft_goes_on_in_free_text_after_its_grammar_is_complete(state: GrammarState) -> None:
    draft = GuidedDraft(state, (1, 2, 3, MARKER))
    assert draft.question is not None
    assert draft.question.matcher is state.matcher
    draft.question.matcher.answer = ALLOWED
    draft.question.answers = (ALLOWED, Complete())
    state.advance()
    assert draft.choices() == [GrammarChoice(ALLOWED), None, None], "the next call is unknown"


def test_a_draft_of_a_grammar_that_was_complete_before_is_read_as_what_follows(
    state: GrammarState,
) -> None:
    """It was planned as the free text that may come in place of a call."""
    draft = GuidedDraft(state, (FREE, MARKER))
    assert state.matcher is not None
    state.matcher.answer = Complete()
    state.advance()
    assert draft.choices() == [None], "a call begins after the marker, and needs a mask"


@pytest.mark.parametrize(
    ("answers", "choices"),
    [((), []), ((ALLOWED,), [GrammarChoice(ALLOWED), END_OF_THINKING])],
    ids=["no mask", "one mask"],
)
def test_choices_end_at_the_first_missing_mask(
    answers: tuple[Allowed, ...], choices: list[GrammarChoice | int]
) -> None:
    """The thinking budget decides what follows the second token. Nothing may take that choice for
    the choice after the first token.
    """
    budget = ThinkingBudget(2, (), (END_OF_THINKING,))
    constraint = Constraint(GRAMMAR, "response_format")
    state = state_of(Request("r", pack((1,)), 100, constraint=constraint, thinking_budget=budget))
    draft = GuidedDraft(state, (1, 2, END_OF_THINKING))
    assert draft.question is not None
    draft.question.matcher.answer = ALLOWED
    draft.question.answers = answers
    state.advance()
    assert draft.choices() == choices
