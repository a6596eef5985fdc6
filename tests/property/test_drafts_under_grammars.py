"""What is said along a draft is what is said when its tokens have been generated."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st
from llguidance import LLMatcher

from engine.grammar.answers import Verdict
from engine.grammar.phases import grammar_plan, untried
from engine.grammar.stage import GuidedDraft, mask_words, masks_of
from engine.grammar.state import GrammarPlan, GrammarState, forced_tokens
from engine.grammar.worker import GrammarError, OpenMatcher, compile_grammar
from engine.values.request import (
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
from tests.looking_ahead import told_ahead

END = 2
N_WORDS = mask_words(DEMO_VOCAB_SIZE)
TOKENIZER = demo_tokenizer(END)
GRAMMARS = LocalGrammars(TOKENIZER, frozenset({END}))

names = st.text("abcdefgh_", min_size=1, max_size=8)
texts = st.text("abc xyz", max_size=12)
leaves: st.SearchStrategy[dict[str, Any]] = (
    st.builds(lambda values: {"enum": values}, st.lists(texts, min_size=1, max_size=3, unique=True))
    | st.builds(lambda value: {"const": value}, texts | st.integers() | st.booleans())
    | st.builds(lambda most: {"type": "string", "maxLength": most}, st.integers(0, 20))
    | st.sampled_from([{"type": one} for one in ("integer", "number", "boolean", "null")])
)


def objects(
    properties: dict[str, dict[str, Any]], required: Callable[[Sequence[str]], Sequence[str]]
) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": required([*properties]),
        "additionalProperties": False,
    }


schemas = st.recursive(
    leaves,
    lambda inner: (
        st.builds(
            objects,
            st.dictionaries(names, inner, max_size=3),
            st.sampled_from([list, lambda keys: [], lambda keys: keys[:1]]),
        )
        | st.builds(lambda items: {"type": "array", "items": items, "maxItems": 3}, inner)
    ),
    max_leaves=5,
)
patterns = st.from_regex(r"\A([a-c]{1,5}(\{1,3\})?\|?|\(hello there\)\+|\[a-z\]\*){1,4}\Z")
larks = st.lists(texts, min_size=1, max_size=4).map(
    lambda words: "start: (" + " | ".join(map(json.dumps, words)) + ' | /[a-f]+;/)* "done"'
)
grammars = (
    st.builds(Grammar, st.just(GrammarKind.JSON_SCHEMA), schemas.map(json.dumps))
    | st.builds(Grammar, st.just(GrammarKind.REGEX), patterns)
    | st.builds(Grammar, st.just(GrammarKind.LARK), larks)
)


def compiled(grammar: Grammar) -> LLMatcher:
    try:
        return compile_grammar(TOKENIZER, grammar.kind, grammar.text)
    except GrammarError:
        assume(False)
        raise


def opened(matcher: LLMatcher, tokens: Sequence[int] = ()) -> OpenMatcher:
    made = OpenMatcher(matcher.deep_copy(), 4 * N_WORDS)
    for token_id in tokens:
        made.accept(token_id)
    return made


def tokens_of(mask: bytes) -> list[int]:
    bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")
    return list(map(int, np.flatnonzero(bits)))


def walk(matcher: LLMatcher, tokens: Sequence[int], data: st.DataObject, most: int) -> list[int]:
    """More tokens that may follow these; the last may be any."""
    walked, wanted = list[int](), data.draw(st.integers(0, most))
    one = opened(matcher, tokens)
    while len(walked) < wanted and not one.is_complete:
        allowed = tokens_of(one.mask())
        walked.append(data.draw(st.sampled_from(allowed)))
        one.accept(walked[-1])
    return walked


@given(grammars, st.data())
def test_masks_along_a_draft_are_those_of_its_tokens(grammar: Grammar, data: st.DataObject) -> None:
    matcher = compiled(grammar)
    tokens = walk(matcher, (), data, 12)
    one = opened(matcher, tokens)
    assume(not one.is_complete)
    draft = walk(matcher, tokens, data, 8)
    draft += data.draw(st.lists(st.integers(0, DEMO_VOCAB_SIZE - 1), max_size=2))
    before, forced = one.mask(), one.forced()
    masks, is_complete = one.ahead(draft, lambda: False)
    for n_tokens, mask in enumerate(masks, 1):
        assert mask == opened(matcher, [*tokens, *draft[:n_tokens]]).mask()
    n_followed = len(masks) + is_complete
    followed = matcher.deep_copy()
    assert followed.consume_tokens([*tokens, *draft[:n_followed]])
    assert followed.is_stopped() == is_complete
    if not is_complete and n_followed < len(draft):
        assert not followed.consume_token(draft[n_followed]), "it is the first that is refused"
    assert (one.mask(), one.forced(), one.n_tokens) == (before, forced, len(tokens))
    later = walk(matcher, tokens, data, 4)
    for token_id in later:
        one.accept(token_id)
    fresh = opened(matcher, [*tokens, *later])
    assert one.is_complete == fresh.is_complete
    assert one.is_complete or one.mask() == fresh.mask()


@given(grammars, st.data())
def test_what_is_forced_is_what_masks_allow_alone(grammar: Grammar, data: st.DataObject) -> None:
    """Else the draft would still be a guess, and text the same: but that would be worth knowing."""
    matcher = compiled(grammar)
    tokens = walk(matcher, (), data, 12)
    one = opened(matcher, tokens)
    for _ in range(6):
        if one.is_complete:
            break
        forced = one.forced()
        masks = [one.mask(), *one.ahead(forced, lambda: False)[0]]
        assert [tokens_of(mask) for mask in masks[: len(forced)]] == [[one] for one in forced]
        one.accept(data.draw(st.sampled_from([*forced[:1], *tokens_of(one.mask())])))


# Grammar states

BEGIN, CALL = 7, 9
blocks = st.sampled_from([None, ThinkingBlock((5, 6), (8,), (60, 61)), ThinkingBlock((), (8, 11))])
held = st.sampled_from(
    [
        Grammar(GrammarKind.REGEX, "ab|ac+"),
        Grammar(GrammarKind.REGEX, "(hello world|hello there)"),
        Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"enum": ["yes", "no"]})),
        Grammar(GrammarKind.LARK, 'start: ("x" | "yy")*'),
    ]
)
calls = st.builds(
    Constraint,
    held,
    st.just("tools"),
    blocks,
    behind=st.just((CALL,)),
    repeats=st.booleans(),
    weaker=st.sampled_from([(), (None,)]),
)
alternatives = st.builds(
    Alternative,
    st.just(BEGIN),
    constraint=st.none() | st.builds(Constraint, held, st.just("tools"), behind=st.just((BEGIN,))),
)
constraints = calls | st.builds(
    Constraint, held, st.just("response_format"), blocks, instead=st.none() | alternatives
)
budgets = st.sampled_from([None, ThinkingBudget(2, (), (8, 11)), ThinkingBudget(1, (5, 6), (8,))])
requests = st.builds(
    lambda constraint, budget: Request(
        "r", pack((1,)), 100, constraint=constraint, thinking_budget=budget
    ),
    constraints,
    budgets,
)


def plan_of(request: Request) -> GrammarPlan:
    verdicts = {grammar: Verdict(None, 0.0) for grammar in untried(request, {})}
    return grammar_plan(request, verdicts, {END}) or GrammarPlan(firsts=())


def settle(state: GrammarState) -> None:
    if (matcher := state.matcher) is not None and matcher.answer is None:
        matcher.answer = GRAMMARS.answer(matcher)
    state.advance()


def mask_of(state: GrammarState) -> list[int]:
    bits = masks_of([state.choice], [()], N_WORDS)
    return tokens_of(bits.tobytes())


def follow(state: GrammarState, data: st.DataObject, most: int) -> list[int]:
    """Tokens that the state allows, and accepts. Markers are as likely as all others."""
    said = list[int]()
    while len(said) < most and not state.is_complete and (allowed := mask_of(state)):
        marks = [one for one in (5, 6, 8, 11, 60, BEGIN, CALL) if one in allowed]
        said.append(data.draw(st.sampled_from(allowed) | st.sampled_from(marks or allowed)))
        state.accept(said[-1])
        settle(state)
    return said


@given(requests, st.data())
def test_choices_along_a_draft_are_those_of_a_state_that_accepts_it(
    request: Request, data: st.DataObject
) -> None:
    plan = plan_of(request)
    state, reference, fresh = (GrammarState(plan) for _ in range(3))
    for one in (state, reference, fresh):
        settle(one)
    said = follow(reference, data, data.draw(st.integers(0, 8)))
    for token_id in said:
        settle(state)
        state.accept(token_id)  # the last is not answered yet
        fresh.accept(token_id)
        settle(fresh)
    assume(not reference.is_complete)
    draft = follow(reference, data, data.draw(st.integers(1, 6)))
    drafted = GuidedDraft(state, tuple(draft))
    if drafted.question is not None:
        question = drafted.question
        told = told_ahead(question, GRAMMARS.answer)
        settle(state)
        if question.matcher.answer is None and data.draw(st.booleans()):
            question.matcher.answer = GRAMMARS.answer(question.matcher)
        question.answers = told[: data.draw(st.integers(0, len(told)) | st.just(len(told)))]
    settle(state)
    choices = drafted.choices()
    assert len(choices) <= len(draft)
    for token_id, choice in zip(draft, choices, strict=False):
        known = tokens_of(masks_of([choice], [()], N_WORDS).tobytes())
        for one in (state, fresh):  # the first knows what was found out, the other asks
            one.accept(token_id)
            settle(one)
            assert not one.is_complete
            assert mask_of(one) == known


@given(requests, st.data())
def test_forced_tokens_are_those_that_masks_allow_alone(
    request: Request, data: st.DataObject
) -> None:
    state = GrammarState(plan_of(request))
    settle(state)
    follow(state, data, data.draw(st.integers(0, 8)))
    for token_id in forced_tokens(state):
        assert mask_of(state) == [token_id]
        state.accept(token_id)
        settle(state)
