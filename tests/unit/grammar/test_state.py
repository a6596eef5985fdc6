"""Grammar states: which tokens may come next, token by token."""

import json
import random
from collections.abc import Sequence
from enum import Enum, auto
from typing import Any

import numpy as np
import pytest
from llguidance import LLTokenizer

from engine.api import InvalidRequest
from engine.grammar.answers import Verdict
from engine.grammar.phases import grammar_plan, is_dispensable
from engine.grammar.stage import mask_words, masks_of
from engine.grammar.state import AllBut, Answer, Complete, GrammarState, Refused, Unanswerable
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
from engine.values.tokens import pack
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
    spellings: frozenset[tuple[int, ...]] = frozenset(),
) -> Request:
    constraint = Constraint(
        Grammar(kind, text), "response_format", thinking, behind, repeats, spellings=spellings
    )
    return Request("r", pack((1,)), 100, constraint=constraint, thinking_budget=budget)


def allowed(state: GrammarState, banned: Sequence[int] = ()) -> set[int]:
    bits = masks_of([state.choice], [banned], mask_words(VOCAB_SIZE))
    row = np.unpackbits(bits.view(np.uint8)[0], count=VOCAB_SIZE, bitorder="little")
    return set(np.flatnonzero(row).tolist())


def say(state: GrammarState, tokenizer: LLTokenizer, text: str) -> None:
    for token_id in tokenizer.tokenize_str(text):
        state.accept(token_id)


class Holds(Enum):
    """What holds at a place of an answer."""

    FREE = auto()  # nothing
    MASK = auto()  # the grammar
    ANY_BUT_THE_END = auto()
    END_MAY_COME = auto()
    NOTHING_MAY_COME = auto()
    COMPLETE = auto()  # the answer ends


FREE, MASK, COMPLETE = Holds.FREE, Holds.MASK, Holds.COMPLETE
Step = int | str | set[int] | Holds
"""A token or a text that comes, the tokens that may come, or what holds."""


def check(state: GrammarState, tokenizer: LLTokenizer, steps: Sequence[Step]) -> None:
    """Follow an answer."""
    for step in steps:
        match step:
            case int():
                state.accept(step)
            case str():
                say(state, tokenizer, step)
            case set():
                assert allowed(state) == step
            case Holds.FREE | Holds.MASK:
                assert (state.choice is None) is (step is FREE)
                assert not state.is_complete
            case Holds.ANY_BUT_THE_END:
                assert allowed(state) == ANY_BUT_THE_END
            case Holds.END_MAY_COME:
                assert END in allowed(state)
            case Holds.NOTHING_MAY_COME:
                assert allowed(state) == set()
                assert not state.is_complete
            case Holds.COMPLETE:
                assert state.is_complete


AB, REFUSED = Grammar(GrammarKind.REGEX, "ab"), Grammar(GrammarKind.REGEX, "(")
TWO = (8, 9)  # the tokens of an end marker


def budgeted(tokens: int, start: tuple[int, ...], end: tuple[int, ...]) -> Request:
    return Request("r", pack((1,)), 100, thinking_budget=ThinkingBudget(tokens, start, end))


def ab(thinking: ThinkingBlock | None = None, **fields: Any) -> Request:
    """An answer that is `ab`."""
    return request(GrammarKind.REGEX, "ab", thinking, **fields)


def weak(*weaker: Grammar | None) -> Request:
    return Request("r", pack((1,)), 100, constraint=Constraint(REFUSED, "tools", weaker=weaker))


ANSWERS: dict[str, tuple[Request, list[Step]]] = {
    "a complete sentence may only end": (ab(), ["ab", COMPLETE]),
    "what went wrong rules out every token": (ab(), ["x", Holds.NOTHING_MAY_COME]),
    "no answer ends within a block before a grammar": (
        ab(ThinkingBlock((), TWO)),
        [Holds.ANY_BUT_THE_END, 50, Holds.ANY_BUT_THE_END, 8, Holds.ANY_BUT_THE_END, 51],
    ),
    "an end token that ends the block may come": (
        ab(ThinkingBlock((), (END,))),
        [Holds.END_MAY_COME, END, MASK, "ab", COMPLETE],
    ),
    "a block may end as it begins": (  # as Harmony's channels do
        ab(ThinkingBlock((5, 6), (5, 9))),
        [5, 6, 50, 5, 9, "ab", COMPLETE],
    ),
    "what ends a block may come first": (
        ab(ThinkingBlock((5, 6), (5, 9))),
        [5, 9, "ab", COMPLETE],
    ),
    "free until a marker": (
        ab(behind=(7, 8)),
        [FREE, 7, FREE, 5, FREE, 8, FREE, 7, FREE, 7, FREE, 8, MASK, "ab", COMPLETE],
    ),
    "each spelling of a marker counts": (
        ab(behind=(7, 8), spellings=frozenset({(6, 8), (9,), (5, 5, 5)}), repeats=True),
        [7, FREE, 8, "ab", 5, 6, FREE, 8, "ab", FREE, 9, "ab", 5, 5, FREE, 5, MASK, "ab", FREE],
    ),
    "a repeated grammar makes room for free text": (
        ab(behind=(7,), repeats=True),
        [FREE, 7, MASK, "ab", FREE, 7, MASK, "ab", FREE],
    ),
    "a marker within open reasoning begins nothing": (
        ab(ThinkingBlock((), (8,)), behind=(9,), repeats=True),
        [9, FREE, 5, FREE, 8, FREE, 5, FREE, 9, MASK, "ab", FREE],
    ),
    "a marker within reasoning begins nothing": (
        ab(ThinkingBlock((7,), (8,)), behind=(9,), repeats=True),
        [7, FREE, 9, FREE, 5, FREE, 8, FREE, 5, FREE, 9, MASK, "ab", FREE],
    ),
    "a marker may come without reasoning": (
        ab(ThinkingBlock((7,), (8,)), behind=(9,)),
        [9, MASK],
    ),
    "a budget forces the end marker": (
        budgeted(2, (), TWO),
        [FREE, 50, FREE, 51, {8}, 8, {9}, 9, FREE, 50, FREE, 50, FREE],
    ),
    "a budget forces the rest of an end marker that has begun": (
        budgeted(2, (), TWO),
        [FREE, 50, FREE, 8, {9}, 9, FREE, 50, FREE, 50, FREE],
    ),
    "a budget counts each block": (
        budgeted(1, (3,), (8,)),
        [3, FREE, 50, {8}, 8, FREE, 50, 50, FREE, 3, FREE, 50, {8}, 8, FREE],
    ),
    "a budget counts from the start marker": (
        budgeted(2, (3,), TWO),
        [FREE, 3, FREE, 50, FREE, 51, {8}, 8, {9}, 9, FREE, 50, FREE, 50, FREE],
    ),
    "a block that ends by itself is not ended again": (
        budgeted(3, (), TWO),
        [50, FREE, 8, FREE, 9, FREE, 60, FREE, 61, FREE, 62, FREE],
    ),
    "a budget of none ends the block at once": (budgeted(0, (), (8,)), [{8}]),
    "a grammar waits for a block whose end is forced": (
        ab(ThinkingBlock((), (8,)), budget=ThinkingBudget(1, (), (8,))),
        [50, {8}, 8, "ab", COMPLETE],
    ),
    "the weaker grammar holds where one is refused": (weak(AB), ["ab", COMPLETE]),
    "the first weaker one that is not refused holds": (
        weak(REFUSED, AB, None),
        ["ab", COMPLETE],
    ),
}


@pytest.mark.parametrize(("asked", "steps"), ANSWERS.values(), ids=ANSWERS)
def test_what_holds_along_an_answer(
    grammars: LocalGrammars, tokenizer: LLTokenizer, asked: Request, steps: Sequence[Step]
) -> None:
    check(grammars.states(asked)(), tokenizer, steps)


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
    return Request("r", pack((1,)), 100, constraint=constraint)


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


@pytest.mark.parametrize("unknown", [-1, 32 * mask_words(VOCAB_SIZE)])
def test_a_ban_of_a_token_that_the_model_does_not_have_changes_nothing(unknown: int) -> None:
    """A checkpoint may name such an end token."""
    bits = masks_of([None, AllBut((unknown,))], [[unknown], []], mask_words(VOCAB_SIZE))
    assert (bits == -1).all()


def test_a_grammar_does_not_end_a_sequence_while_a_thinking_budget_forces_tokens() -> None:
    """Its answer is known from a look-ahead alone: what a sequence says depends on no draft."""
    budget = ThinkingBudget(tokens=0, start=(7,), end=(8,))
    asked = Request(
        "r", pack((1,)), 100, constraint=Constraint(AB, "tools"), thinking_budget=budget
    )
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


@pytest.mark.parametrize("weaker", [(), (REFUSED,)])
def test_a_constraint_whose_grammars_are_all_refused_is_an_error_unless_it_may_be_none(
    grammars: LocalGrammars, weaker: tuple[Grammar | None, ...]
) -> None:
    asked = Request("r", pack((1,)), 100, constraint=Constraint(REFUSED, "tools", weaker=weaker))
    with pytest.raises(InvalidRequest, match=r"^tools: ."):
        grammars.states(asked)
    assert not is_dispensable(asked)
    free = Constraint(REFUSED, "tools", behind=(7,), weaker=(*weaker, None))
    asked = Request("r", pack((1,)), 100, constraint=free)
    assert is_dispensable(asked)
    state = grammars.states(asked)()
    state.accept(7)
    assert state.choice is None


@pytest.mark.parametrize("answer", [Refused("too costly"), Unanswerable("nobody is there")])
def test_a_grammar_that_may_be_none_is_let_go_where_it_cannot_be_followed(answer: Answer) -> None:
    constraint = Constraint(AB, "tools", behind=(7,), repeats=True, weaker=(None,))
    asked = Request("r", pack((1,)), 100, constraint=constraint)
    plan = grammar_plan(asked, {AB: Verdict(None, 0.0)}, end_tokens=())
    assert plan is not None
    state = GrammarState(plan)
    state.accept(7)
    assert state.matcher is not None
    state.matcher.answer = answer
    state.advance()
    assert state.choice is None
    assert not state.is_complete


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


def test_a_marker_that_the_model_does_not_have_rules_out_every_token_of_its_row_alone(
    grammars: LocalGrammars,
) -> None:
    budget = ThinkingBudget(tokens=0, start=(), end=(VOCAB_SIZE,))
    lost = grammars.states(Request("r", pack((1,)), 100, thinking_budget=budget))()
    sound = grammars.states(request(GrammarKind.REGEX, "ab"))()
    bits = masks_of([lost.choice, sound.choice], [(), ()], mask_words(VOCAB_SIZE))
    assert [row.any() for row in bits] == [False, True]
