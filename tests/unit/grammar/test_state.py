"""Grammar states: which tokens may come next, token by token."""

import json
import random
from collections.abc import Sequence

import numpy as np
import pytest
from llguidance import LLTokenizer

from engine.api import InvalidRequest
from engine.grammar.answers import Verdict
from engine.grammar.masks import mask_words, masks_of
from engine.grammar.matcher import Answer, Complete, Refused, Unanswerable
from engine.grammar.phases import grammar_plan, is_dispensable
from engine.grammar.state import GrammarState
from engine.values.request import (
    MAX_GRAMMAR_CHARACTERS,
    Alternative,
    Constraint,
    Grammar,
    GrammarKind,
    Request,
    ThinkingBlock,
    ThinkingBudget,
)
from tests.grammars import DEMO_VOCAB_SIZE, LocalGrammars, demo_tokenizer

VOCAB_SIZE = DEMO_VOCAB_SIZE
END = 2  # <|im_end|>
ANY_BUT_THE_END = set(range(VOCAB_SIZE)) - {END}


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return demo_tokenizer(END)


@pytest.fixture
def grammars(tokenizer: LLTokenizer) -> LocalGrammars:
    return LocalGrammars(tokenizer, frozenset({END}))


def request(
    kind: GrammarKind,
    text: str,
    thinking: ThinkingBlock | None = None,
    behind: tuple[int, ...] = (),
    repeats: bool = False,
    budget: ThinkingBudget | None = None,
) -> Request:
    constraint = Constraint(Grammar(kind, text), "response_format", thinking, behind, repeats)
    return Request("r", (1,), 100, constraint=constraint, thinking_budget=budget)


def allowed(state: GrammarState, banned: Sequence[int] = ()) -> set[int]:
    bits = masks_of([state.choice], [banned], mask_words(VOCAB_SIZE))
    row = np.unpackbits(bits.view(np.uint8)[0], count=VOCAB_SIZE, bitorder="little")
    return set(np.flatnonzero(row).tolist())


def say(state: GrammarState, tokenizer: LLTokenizer, text: str) -> None:
    for token_id in tokenizer.tokenize_str(text):
        state.accept(token_id)


def test_a_random_walk_through_a_schema_ends_with_text_that_conforms(
    grammars: LocalGrammars, tokenizer: LLTokenizer
) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    states = grammars.states(request(GrammarKind.JSON_SCHEMA, json.dumps(schema)))
    for seed in range(20):
        rng, state, said = random.Random(seed), states(), list[int]()
        while not state.is_complete:
            said.append(rng.choice(sorted(allowed(state) - ({END} if len(said) < 9 else set()))))
            if said[-1] == END:
                break
            state.accept(said[-1])
        value = json.loads(tokenizer.decode_str([t for t in said if t != END]))
        assert set(value) == {"a", "b"}, f"seed {seed}"
        assert isinstance(value["a"], int), f"seed {seed}"
        assert value["b"] in {"x", "y"}, f"seed {seed}"


def test_a_block_may_come_before_the_grammar_or_not(
    grammars: LocalGrammars, tokenizer: LLTokenizer
) -> None:
    states = grammars.states(request(GrammarKind.REGEX, "ab", ThinkingBlock((5, 6), (8, 9))))
    thinking, direct = states(), states()
    assert allowed(thinking) - {5} == allowed(grammars.states(request(GrammarKind.REGEX, "ab"))())
    assert 5 in allowed(thinking)
    for token_id in (5, 6, 50, 8, 9):
        thinking.accept(token_id)
        assert (allowed(thinking) == ANY_BUT_THE_END) == (token_id != 9)
    for state in (thinking, direct):
        assert 5 not in allowed(state) or state is direct
        say(state, tokenizer, "ab")
        assert state.is_complete


def test_no_answer_ends_within_a_block_that_comes_before_a_grammar(
    grammars: LocalGrammars,
) -> None:
    """It would be one without what the grammar asks for."""
    opened = ThinkingBlock((), (8, 9))
    state = grammars.states(request(GrammarKind.REGEX, "ab", opened))()
    for token_id in (50, 8, 51):
        assert allowed(state) == ANY_BUT_THE_END
        state.accept(token_id)
    called = grammars.states(request(GrammarKind.REGEX, "ab", behind=(7,)))()
    assert called.choice is None, "who need not call may end"


def test_an_end_token_that_ends_the_block_may_come(grammars: LocalGrammars) -> None:
    block = ThinkingBlock((), (END,))
    state = grammars.states(request(GrammarKind.REGEX, "ab", block))()
    assert END in allowed(state)
    state.accept(END)
    assert END not in allowed(state)


def test_what_ends_a_block_may_begin_as_the_block_does(
    grammars: LocalGrammars, tokenizer: LLTokenizer
) -> None:
    """As Harmony's channels do: the final one may be the first."""
    states = grammars.states(request(GrammarKind.REGEX, "ab", ThinkingBlock((5, 6), (5, 9))))
    for block in ((5, 6, 50, 5, 9), (5, 9)):
        state = states()
        for token_id in block:
            state.accept(token_id)
        say(state, tokenizer, "ab")
        assert state.is_complete


def test_white_space_may_stand_between_a_block_and_the_grammar(
    grammars: LocalGrammars, tokenizer: LLTokenizer
) -> None:
    space = (60, 61)
    grammar = allowed(grammars.states(request(GrammarKind.REGEX, "ab"))())
    for begin in ((), (5,)):
        block = ThinkingBlock(begin, (8,), space)
        states = grammars.states(request(GrammarKind.REGEX, "ab", block))
        for said in ((), (61,)):
            state = states()
            for token_id in (*begin, 50, 61, 8):
                state.accept(token_id)
            assert allowed(state) == grammar | {*space}
            for token_id in said:
                state.accept(token_id)
                assert allowed(state) == grammar, "once"
            say(state, tokenizer, "ab")
            assert state.is_complete
    assert allowed(states()) == grammar | {5}, "in front there is none"


BEGIN = 7
"""Begins the alternative; no text of the grammars here begins with it."""
CALL = Constraint(Grammar(GrammarKind.REGEX, "call"), "tools", behind=(BEGIN,))


def either(thinking: ThinkingBlock | None, calls: Constraint | None) -> Request:
    grammar = Grammar(GrammarKind.REGEX, "yes|no")
    constraint = Constraint(
        grammar, "response_format", thinking, instead=Alternative(BEGIN, constraint=calls)
    )
    return Request("r", (1,), 100, constraint=constraint)


@pytest.mark.parametrize(
    ("thinking", "thoughts"),
    [
        (None, ()),
        (ThinkingBlock((), (8, 9)), (50, 8, 9)),
        (ThinkingBlock((5, 6), (8, 9)), ()),
        (ThinkingBlock((5, 6), (8, 9)), (5, 6, 50, BEGIN, 8, 9)),
    ],
)
def test_the_first_token_of_an_answer_tells_which_of_two_grammars_holds(
    grammars: LocalGrammars,
    tokenizer: LLTokenizer,
    thinking: ThinkingBlock | None,
    thoughts: Sequence[int],
) -> None:
    states = grammars.states(either(thinking, CALL))
    grammar = allowed(grammars.states(request(GrammarKind.REGEX, "yes|no"))())
    for other, text in ((True, "call"), (False, "no")):
        state = states()
        for token_id in thoughts:
            if token_id == BEGIN:
                assert allowed(state) == ANY_BUT_THE_END, "within a block it begins nothing"
            state.accept(token_id)
        may_think = {5} if thinking is not None and thinking.begin and not thoughts else set()
        assert allowed(state) == grammar | {BEGIN} | may_think
        assert not state.is_complete
        if other:
            state.accept(BEGIN)
        say(state, tokenizer, text[0])
        assert allowed(state).isdisjoint({BEGIN, 5})
        say(state, tokenizer, text[1:])
        assert state.is_complete


def test_an_alternative_without_a_constraint_is_free(
    grammars: LocalGrammars, tokenizer: LLTokenizer
) -> None:
    states = grammars.states(either(None, None))
    free, held = states(), states()
    for token_id in (BEGIN, 50, BEGIN, 51):
        free.accept(token_id)
        assert free.choice is None
        assert not free.is_complete
    say(held, tokenizer, "yes")
    assert held.is_complete


def test_an_alternative_that_is_no_grammar_is_refused_by_its_own_field(
    grammars: LocalGrammars,
) -> None:
    wrong = Constraint(Grammar(GrammarKind.REGEX, "("), "tools", behind=(BEGIN,))
    with pytest.raises(InvalidRequest, match=r"^tools: ."):
        grammars.states(either(None, wrong))


def test_a_complete_sentence_may_only_end(grammars: LocalGrammars, tokenizer: LLTokenizer) -> None:
    state = grammars.states(request(GrammarKind.REGEX, "yes|no"))()
    assert allowed(state) <= {t for t in range(VOCAB_SIZE) if tokenizer.decode_str([t])[:1] in "yn"}
    say(state, tokenizer, "yes")
    assert state.is_complete


def test_a_ban_gives_way_where_nothing_else_is_left(
    grammars: LocalGrammars, tokenizer: LLTokenizer
) -> None:
    state = grammars.states(request(GrammarKind.LARK, 'start: "a"+'))()
    say(state, tokenizer, "a")
    assert END in allowed(state)
    assert END not in allowed(state, banned=[END])
    assert allowed(state, banned=range(VOCAB_SIZE)) == allowed(state)


def test_free_until_a_marker_and_behind_it_a_grammar(
    grammars: LocalGrammars, tokenizer: LLTokenizer
) -> None:
    marker = (7, 8)
    state = grammars.states(request(GrammarKind.REGEX, "ab", behind=marker))()
    for token_id in (7, 5, 8, 7, 7):
        state.accept(token_id)
        assert state.choice is None
    state.accept(8)
    assert state.choice is not None
    say(state, tokenizer, "ab")
    assert state.is_complete


def test_a_repeated_grammar_makes_room_for_free_text_again(
    grammars: LocalGrammars, tokenizer: LLTokenizer
) -> None:
    state = grammars.states(request(GrammarKind.REGEX, "ab", behind=(7,), repeats=True))()
    for _ in range(2):
        assert state.choice is None
        state.accept(7)
        assert state.choice is not None
        say(state, tokenizer, "ab")
        assert not state.is_complete
    assert state.choice is None


@pytest.mark.parametrize("start", [(), (3,)])
def test_a_thinking_budget_forces_the_end_marker(
    grammars: LocalGrammars, start: tuple[int, ...]
) -> None:
    budget = ThinkingBudget(tokens=2, start=start, end=(8, 9))
    state = grammars.states(Request("r", (1,), 100, thinking_budget=budget))()
    for token_id in (*start, 50, 51):
        assert state.choice is None
        state.accept(token_id)
    for forced in (8, 9):
        assert allowed(state) == {forced}
        state.accept(forced)
    for _ in range(5):
        assert state.choice is None
        state.accept(50)


def test_a_block_that_ends_by_itself_is_not_ended_again(grammars: LocalGrammars) -> None:
    budget = ThinkingBudget(tokens=3, start=(), end=(8, 9))
    state = grammars.states(Request("r", (1,), 100, thinking_budget=budget))()
    for token_id in (50, 8, 9, 60, 61, 62):
        state.accept(token_id)
        assert state.choice is None


def test_a_budget_of_none_ends_the_block_at_once(grammars: LocalGrammars) -> None:
    budget = ThinkingBudget(tokens=0, start=(), end=(8,))
    state = grammars.states(Request("r", (1,), 100, thinking_budget=budget))()
    assert allowed(state) == {8}


def test_a_grammar_waits_behind_a_block_whose_end_is_forced(
    grammars: LocalGrammars, tokenizer: LLTokenizer
) -> None:
    budget = ThinkingBudget(tokens=1, start=(), end=(8,))
    state = grammars.states(
        request(GrammarKind.REGEX, "ab", ThinkingBlock((), (8,)), budget=budget)
    )()
    state.accept(50)
    assert allowed(state) == {8}
    state.accept(8)
    say(state, tokenizer, "ab")
    assert state.is_complete


def test_a_grammar_does_not_end_a_sequence_while_a_thinking_budget_forces_tokens() -> None:
    """Its answer is known from a look-ahead alone: what a sequence says depends on no draft."""
    budget = ThinkingBudget(tokens=0, start=(7,), end=(8,))
    asked = Request("r", (1,), 100, constraint=Constraint(AB, "tools"), thinking_budget=budget)
    plan = grammar_plan(asked, {AB: Verdict(None, 0.0)}, end_tokens=())
    assert plan is not None
    state = GrammarState(plan)
    hidden = state.matcher
    assert hidden is not None
    state.accept(7)
    assert state.choice == 8
    hidden.answer = Complete()
    state.advance()
    assert state.choice == 8
    assert not state.is_complete


def test_the_sequences_of_a_request_do_not_move_each_other(
    grammars: LocalGrammars, tokenizer: LLTokenizer
) -> None:
    states = grammars.states(request(GrammarKind.REGEX, "ab"))
    first, second = states(), states()
    before = allowed(second)
    say(first, tokenizer, "a")
    assert allowed(second) == before


AB, REFUSED = Grammar(GrammarKind.REGEX, "ab"), Grammar(GrammarKind.REGEX, "(")


@pytest.mark.parametrize("weaker", [(AB,), (REFUSED, AB, None)])
def test_where_a_grammar_is_refused_the_first_weaker_one_that_is_not_holds(
    grammars: LocalGrammars, tokenizer: LLTokenizer, weaker: tuple[Grammar | None, ...]
) -> None:
    constraint = Constraint(REFUSED, "tools", weaker=weaker)
    state = grammars.states(Request("r", (1,), 100, constraint=constraint))()
    say(state, tokenizer, "ab")
    assert state.is_complete


@pytest.mark.parametrize("weaker", [(), (REFUSED,)])
def test_a_constraint_whose_grammars_are_all_refused_is_an_error_unless_it_may_be_none(
    grammars: LocalGrammars, weaker: tuple[Grammar | None, ...]
) -> None:
    asked = Request("r", (1,), 100, constraint=Constraint(REFUSED, "tools", weaker=weaker))
    with pytest.raises(InvalidRequest, match=r"^tools: ."):
        grammars.states(asked)
    assert not is_dispensable(asked)
    free = Constraint(REFUSED, "tools", behind=(7,), weaker=(*weaker, None))
    asked = Request("r", (1,), 100, constraint=free)
    assert is_dispensable(asked)
    state = grammars.states(asked)()
    state.accept(7)
    assert state.choice is None


@pytest.mark.parametrize("answer", [Refused("too costly"), Unanswerable("nobody is there")])
def test_a_grammar_that_may_be_none_is_let_go_where_it_cannot_be_followed(answer: Answer) -> None:
    constraint = Constraint(AB, "tools", behind=(7,), repeats=True, weaker=(None,))
    asked = Request("r", (1,), 100, constraint=constraint)
    plan = grammar_plan(asked, {AB: Verdict(None, 0.0)}, end_tokens=())
    assert plan is not None
    state = GrammarState(plan)
    state.accept(7)
    assert state.matcher is not None
    state.matcher.answer = answer
    state.advance()
    assert state.choice is None
    assert not state.is_complete


def test_a_marker_within_reasoning_begins_nothing(
    grammars: LocalGrammars, tokenizer: LLTokenizer
) -> None:
    begin, end, marker = 7, 8, 9
    opened, closed = ThinkingBlock((), (end,)), ThinkingBlock((begin,), (end,))
    for thinking, before in ((opened, (marker, 5)), (closed, (begin, marker, 5))):
        constraint = Constraint(AB, "tools", thinking, behind=(marker,), repeats=True)
        state = grammars.states(Request("r", (1,), 100, constraint=constraint))()
        for token in (*before, end, 5):
            state.accept(token)
            assert state.choice is None
        state.accept(marker)
        assert state.choice is not None
        say(state, tokenizer, "ab")
        assert state.choice is None
    constraint = Constraint(AB, "tools", closed, behind=(marker,))
    state = grammars.states(Request("r", (1,), 100, constraint=constraint))()
    state.accept(marker)
    assert state.choice is not None


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (GrammarKind.JSON_SCHEMA, "{"),
        (GrammarKind.JSON_SCHEMA, '{"type": "nonsense"}'),
        (GrammarKind.JSON_SCHEMA, '{"$ref": "http://example.com/schema"}'),
        (GrammarKind.JSON_SCHEMA, '{"uniqueItems": true, "type": "array"}'),
        (GrammarKind.REGEX, "(a"),
        (GrammarKind.REGEX, "(?=a)b"),
        (GrammarKind.LARK, "start: nothing"),
        (GrammarKind.LARK, "start: " + '"a" ' * 100_000),
        (GrammarKind.REGEX, "a" * (MAX_GRAMMAR_CHARACTERS[GrammarKind.REGEX] + 1)),
        (GrammarKind.REGEX, "a?" * 2000),
    ],
)
def test_a_bad_or_too_costly_grammar_is_refused_by_field(
    grammars: LocalGrammars, kind: GrammarKind, text: str
) -> None:
    with pytest.raises(InvalidRequest, match=r"^response_format: .") as refused:
        grammars.states(request(kind, text))
    assert refused.value.param == "response_format"
    assert len(str(refused.value)) < 600


def test_a_matcher_that_went_wrong_rules_out_every_token(
    grammars: LocalGrammars, tokenizer: LLTokenizer
) -> None:
    state = grammars.states(request(GrammarKind.REGEX, "ab"))()
    say(state, tokenizer, "x")
    assert allowed(state) == set()
    assert not state.is_complete


def test_a_marker_that_the_model_does_not_have_rules_out_every_token_of_its_row_alone(
    grammars: LocalGrammars,
) -> None:
    budget = ThinkingBudget(tokens=0, start=(), end=(VOCAB_SIZE,))
    lost = grammars.states(Request("r", (1,), 100, thinking_budget=budget))()
    sound = grammars.states(request(GrammarKind.REGEX, "ab"))()
    bits = masks_of([lost.choice, sound.choice], [(), ()], mask_words(VOCAB_SIZE))
    assert [row.any() for row in bits] == [False, True]
