"""Grammars on a real engine: a random checkpoint at temperature 1 says what it is told to say, and
nobody beside it notices."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
import pytest_asyncio

from engine.api import Engine, InvalidRequest
from engine.launch import launch
from engine.values.output import FinishReason, OutputEvent
from engine.values.request import (
    Alternative,
    Constraint,
    Grammar,
    GrammarKind,
    Request,
    SamplingParams,
    ThinkingBlock,
    ThinkingBudget,
)
from engine.values.settings import EngineConfig
from engine.values.tokens import pack
from server.parsing.formats.json_calls import HERMES
from server.parsing.lark import Function, calls_grammar
from tests.checkpoints import FAMILIES, write_family
from tools.events import events_of

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["city", "days", "tags"],
    "additionalProperties": False,
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engine]:
    model = write_family(FAMILIES["qwen3"], tmp_path_factory.mktemp("models"))
    config = EngineConfig(model=str(model), kv_cache_bytes=16 << 20, max_running=32)
    made = await launch(config, lambda line: None)
    yield made
    await made.drain(0.0)


def schema(value: Any = SCHEMA) -> Constraint:
    return Constraint(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(value)), "response_format")


def regex(pattern: str, **options: Any) -> Constraint:
    return Constraint(Grammar(GrammarKind.REGEX, pattern), "guided_regex", **options)


def request(name: str, seed: int = 1, max_tokens: int = 200, **options: Any) -> Request:
    sampling = SamplingParams(seed=seed, **options.pop("sampling", {}))
    return Request(name, pack(range(5, 25)), max_tokens, sampling, **options)


async def said(engine: Engine, request: Request) -> list[OutputEvent]:
    return [event async for event in events_of(engine, request)]


def text_of(events: list[OutputEvent]) -> str:
    return "".join(event.text for event in events)


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_what_a_schema_asks_for_validates(engine: Engine) -> None:
    requests = [request(f"s{i}", seed=i, constraint=schema()) for i in range(16)]
    answers = await asyncio.gather(*(said(engine, one) for one in requests))
    complete = [a for a in answers if a[-1].finish_reason is FinishReason.STOP]
    assert len(complete) > 12  # others write numbers without end
    for events in complete:
        jsonschema.validate(json.loads(text_of(events)), SCHEMA)


BEGIN = 40
"""Stands for a marker of calls that is a token of its own."""


async def test_an_answer_is_of_its_schema_or_a_call_and_nothing_else(engine: Engine) -> None:
    marker = "<tool_call>"
    function = Function("look", {"properties": {"depth": {"enum": [1, 2]}}, "required": ["depth"]})
    text = calls_grammar(HERMES.syntax, [function], {marker: BEGIN}, many=False, behind=marker)
    calls = Constraint(Grammar(GrammarKind.LARK, text), "tools", behind=(BEGIN,))
    either = replace(schema(), instead=Alternative(BEGIN, calls))
    options: dict[str, Any] = {"constraint": either, "sampling": {"logit_bias": {BEGIN: 2.0}}}
    requests = [request(f"e{i}", seed=i, **options) for i in range(24)]
    answers = await asyncio.gather(*(said(engine, one) for one in requests))
    complete = [a for a in answers if a[-1].finish_reason is FinishReason.STOP]
    called = [a for a in complete if _tokens(a)[0] == BEGIN]
    spoken = [a for a in complete if _tokens(a)[0] != BEGIN]
    assert len(called) > 2
    assert len(spoken) > 2
    for events in called:
        call = engine.tokenizer.decode(_tokens(events)[1:]).partition("</tool_call>")[0]
        assert json.loads(call)["name"] == "look"
        assert json.loads(call)["arguments"]["depth"] in {1, 2}
    for events in spoken:
        jsonschema.validate(json.loads(text_of(events)), SCHEMA)


async def test_free_rows_say_what_they_say_alone(engine: Engine) -> None:
    alone = [await said(engine, request(f"a{i}", i, 40, ignore_eos=True)) for i in range(4)]
    beside = await asyncio.gather(
        *(said(engine, request(f"b{i}", i, 40, ignore_eos=True)) for i in range(4)),
        *(said(engine, request(f"c{i}", i, constraint=schema())) for i in range(4)),
    )
    assert [_tokens(events) for events in beside[:4]] == [_tokens(events) for events in alone]


async def test_drafts_change_nothing_that_a_grammar_holds(engine: Engine) -> None:
    """The second time the tree knows the answer."""
    marked = regex("(hello there|hello world), ", behind=(BEGIN,), repeats=True)
    constraints = [schema(), schema({"enum": ["one long word", "another"]}), marked]
    for nth, constraint in enumerate([*constraints, regex("(yes, of course|no) [a-z]{40}")]):
        options: dict[str, Any] = {
            "seed": nth,
            "max_tokens": 60,
            "constraint": constraint,
            "sampling": {"logit_bias": {BEGIN: 4.0}},
        }
        plain = _tokens(await said(engine, request(f"p{nth}", speculate=False, **options)))
        for time in "12":
            assert _tokens(await said(engine, request(f"d{nth}{time}", **options))) == plain


async def test_the_outputs_of_one_request_are_guided_each_for_itself(engine: Engine) -> None:
    events = await said(engine, request("n", n=4, constraint=regex("(yes|no) (maybe)?")))
    for index in range(4):
        own = text_of([event for event in events if event.index == index])
        assert own in {"yes ", "no ", "yes maybe", "no maybe"}


async def test_a_grammar_wins_over_min_tokens_and_ignore_eos(engine: Engine) -> None:
    sampling = {"min_tokens": 50, "logit_bias": {1: 100.0}}
    one = request("m", constraint=regex("ab"), ignore_eos=True, sampling=sampling)
    events = await said(engine, one)
    assert text_of(events) == "ab"
    assert events[-1].finish_reason is FinishReason.STOP


LIMITED: dict[str, Any] = {
    "allowed_token_ids": frozenset({10, 11, 12, 13}),
    "bad_words": ((10,), (11, 11), (12, 13, 12), (13, 11, 12)),
}


@pytest.mark.parametrize("speculate", [False, True])
async def test_what_may_not_be_generated_is_not_of_any_output(
    engine: Engine, speculate: bool
) -> None:
    """The second time the tree knows the answers, where tokens may be drafted."""
    options: dict[str, Any] = {"ignore_eos": True, "speculate": speculate}
    one = request("w", 7, 60, n=3, sampling=LIMITED, **options)
    runs = [await said(engine, replace(one, id=f"w{time}{speculate}")) for time in range(2)]
    for index in range(3):
        outputs = [_tokens([event for event in events if event.index == index]) for events in runs]
        assert outputs[0] == outputs[1]
        assert set(outputs[0]) == {11, 12, 13}
        for at in range(60):
            for word in LIMITED["bad_words"]:
                assert tuple(outputs[0][at : at + len(word)]) != word


async def test_a_grammar_chooses_among_what_may_be_generated(engine: Engine) -> None:
    digits = {text: engine.tokenizer.encode(text, add_special_tokens=False) for text in "37"}
    (three,), (seven,) = digits.values()
    allowed = frozenset({three, seven, *engine.card.eos_token_ids})
    sampling = {"allowed_token_ids": allowed, "bad_words": ((three, three), (seven, seven))}
    one = request("z", constraint=regex("[0-9]{6}"), sampling=sampling)
    assert text_of(await said(engine, one)) in {"373737", "737373"}
    forced = request("y", constraint=regex("ab"), sampling=sampling)
    assert text_of(await said(engine, forced)) == "ab"


async def test_a_stop_string_may_end_it_before_the_grammar(engine: Engine) -> None:
    events = await said(engine, request("t", constraint=regex("x{10}"), stop=("xxx",)))
    assert text_of(events) == ""
    assert events[-1].stopped_by == "xxx"


async def test_behind_a_forced_marker_the_grammar_holds(engine: Engine) -> None:
    end = tuple(engine.tokenizer.encode("the cat", add_special_tokens=False))
    one = request(
        "r",
        constraint=regex("ab", thinking=ThinkingBlock((), end)),
        thinking_budget=ThinkingBudget(3, (), end),
        ignore_eos=True,
    )
    events = await said(engine, one)
    tokens = _tokens(events)
    assert tuple(tokens[3 : 3 + len(end)]) == end
    assert text_of(events).endswith("the catab")


async def test_a_model_that_would_end_while_it_thinks_says_what_the_grammar_asks_for(
    engine: Engine,
) -> None:
    end = tuple(engine.tokenizer.encode("the cat", add_special_tokens=False))
    one = request(
        "u",
        constraint=regex("ab", thinking=ThinkingBlock((), end)),
        thinking_budget=ThinkingBudget(3, (), end),
        sampling={"logit_bias": dict.fromkeys(engine.card.eos_token_ids, 100.0)},
    )
    assert text_of(await said(engine, one)).endswith("the catab")


async def test_a_bad_grammar_is_refused_and_harms_nobody(engine: Engine) -> None:
    neighbour = asyncio.ensure_future(said(engine, request("h", constraint=schema())))
    with pytest.raises(InvalidRequest, match="response_format: "):
        await said(engine, request("bad", constraint=schema({"type": "nothing"})))
    with pytest.raises(InvalidRequest, match="guided_regex: "):
        await said(engine, request("worse", constraint=regex("(")))
    assert (await neighbour)[-1].finish_reason is FinishReason.STOP


async def test_a_row_that_a_mask_leaves_nothing_fails_alone(engine: Engine) -> None:
    """A budget whose marker is a token that the model does not have."""
    nothing = ThinkingBudget(0, (), (engine.card.vocab_size,))
    failing, sound = await asyncio.gather(
        said(engine, request("f", thinking_budget=nothing)),
        said(engine, request("g", constraint=schema())),
    )
    assert failing[-1].finish_reason is FinishReason.ERROR
    assert sound[-1].finish_reason is FinishReason.STOP


async def test_a_special_token_stays_in_the_text_that_asks_for_it(engine: Engine) -> None:
    (special,) = sorted(engine.card.eos_token_ids)
    bias = {"logit_bias": {special: 100.0}}
    hidden = await said(engine, request("i", 1, 3, ignore_eos=True, sampling=bias))
    shown = await said(
        engine, request("j", 1, 3, ignore_eos=True, sampling=bias, skip_special_tokens=False)
    )
    assert _tokens(hidden) == _tokens(shown) == [special] * 3
    assert text_of(hidden) == ""
    assert text_of(shown) == 3 * engine.tokenizer.decode([special])


async def test_an_admission_comes_first_with_what_the_end_reports(engine: Engine) -> None:
    await said(engine, request("k", 1, 2))
    events = await said(engine, request("l", 1, 2))
    first, last = events[0].admission, events[-1].usage
    assert first is not None
    assert last is not None
    assert (first.prompt_tokens, first.cached_tokens) == (20, last.cached_tokens)
    assert first.cached_tokens == 19


def _tokens(events: list[OutputEvent]) -> list[int]:
    return [token_id for event in events for token_id in event.token_ids]
