"""Thinking budgets: each block ends within its limit, by an end marker that is there once."""

from hypothesis import given
from hypothesis import strategies as st

from engine.grammar.phases import grammar_plan
from engine.grammar.state import GrammarState
from engine.values.request import Request, ThinkingBudget
from engine.values.tokens import pack

TOKENS = st.integers(0, 2)  # few, so that markers come by chance, and begin within each other


def markers(least: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(TOKENS, min_size=least, max_size=3).map(tuple)


budgets = st.builds(ThinkingBudget, st.integers(0, 4), markers(0), markers(1), st.booleans())


def expected(budget: ThinkingBudget, wishes: list[int]) -> list[int]:
    """What a sequence says that wishes to say this. `since` are its tokens since it has entered or
    left a block.
    """
    said, since = list[int](), list[int]()
    is_open = budget.is_open or not budget.start
    for wish in wishes:
        token_id = wish
        if is_open and len(since) >= budget.tokens:
            begun = (n for n in range(len(budget.end)) if ends_with(since, budget.end[:n]))
            token_id = budget.end[max(begun)]
        said.append(token_id)
        since.append(token_id)
        marker = budget.end if is_open else budget.start
        if marker and ends_with(since, marker):
            is_open, since = not is_open, []
    return said


def ends_with(tokens: list[int], marker: tuple[int, ...]) -> bool:
    return tuple(tokens[len(tokens) - len(marker) :]) == marker


@given(budgets, st.lists(TOKENS, max_size=40))
def test_each_block_is_limited_and_its_end_marker_comes_once(
    budget: ThinkingBudget, wishes: list[int]
) -> None:
    plan = grammar_plan(Request("r", pack((1,)), 100, thinking_budget=budget), {}, ())
    assert plan is not None
    state, said = GrammarState(plan), list[int]()
    for wish in wishes:
        choice = state.choice
        said.append(choice if isinstance(choice, int) else wish)
        state.accept(said[-1])
        state.advance()
    assert said == expected(budget, wishes)
