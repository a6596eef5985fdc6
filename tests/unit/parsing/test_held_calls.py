"""Under `auto` a call is held once it has begun, in every format whose marker begins with a token
of its own: no name is invented, and no value against the schema."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import jsonschema
import pytest

from engine.values.request import Constraint, Grammar, Request
from server.dialects.chat.routes import as_chat
from server.dialects.chat.schema import ChatRequest
from server.errors import ApiError
from server.generation.plan import AnswerPlanner
from server.parsing.registry import TOOL_FORMATS, Formats, answer_format
from server.settings.models import ConversationSettings
from tests.contract.fake_engine import ByteTokenizer
from tests.grammars import LocalGrammars, demo_tokenizer
from tests.unit.parsing.answers import Answer, parsed
from tests.unit.parsing.walks import walk

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer"}},
    "required": ["city"],
}
NAMES = {"get_weather": CITY, "ping": {"type": "object", "properties": {}}}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": parameters}}
    for name, parameters in NAMES.items()
]
STAND_INS = (1022, 1023)
"""The demonstration model's <tool_call> and </tool_call>, which stand for other families' too."""

SPECIAL: Mapping[str, Sequence[str]] = {
    "openai": ["<|channel|>"],
    "kimi_k3": ["<|open|>", "<|sep|>"],
    "deepseek_v32": ["｜DSML｜"],
}
"""Where more than one token makes the marker: those of them that no text spells."""

DEMO = demo_tokenizer(2)


class SpecialTokenizer(ByteTokenizer):
    """The demonstration model's tokens, with a family's tokens in place of two of its own."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        for name, token in self.added_tokens.items():
            before, found, behind = text.partition(name)
            if found:
                more = self.encode(behind, add_special_tokens=False)
                return [*self.encode(before, add_special_tokens=False), token, *more]
        return DEMO.tokenize_str(text) if text else []

    def decode(self, token_ids: Sequence[int]) -> str:
        names = {token: name.encode() for name, token in self.added_tokens.items()}
        pieces = [names.get(token) or DEMO.decode_bytes([token]) for token in token_ids]
        return b"".join(pieces).decode()


def tokenizer(name: str) -> SpecialTokenizer:
    special = SPECIAL.get(name, [TOOL_FORMATS[name].begins[0], "</tool_call>"])
    return SpecialTokenizer(added_tokens=dict(zip(special, STAND_INS, strict=False)))


def constraint(name: str, **fields: Any) -> Constraint:
    settings = ConversationSettings(tool_parser=name, reasoning_parser="auto")
    messages = [{"role": "user", "content": "Hi"}]
    body = as_chat(ChatRequest.model_validate({"messages": messages, "tools": TOOLS, **fields}))
    made = AnswerPlanner(tokenizer(name), settings).plan(body, ()).constraint
    assert made is not None
    return made


@cache
def written(name: str) -> list[list[int]]:
    """What a model may write behind the marker."""
    walks = (walk(constraint(name).grammar.text, seed, ['"']) for seed in range(24))
    return [tokens for tokens in walks if tokens is not None]


def follows(grammar: Grammar, tokens: Sequence[int]) -> bool:
    matcher = LocalGrammars(DEMO, frozenset()).matcher(grammar)
    return bool(matcher.validate_tokens(list(tokens)) == len(tokens))


def calls(
    name: str, held: Constraint, tokens: Sequence[int], tools: Mapping[str, Any] = NAMES
) -> Answer:
    """What a client gets of a text that begins with the marker."""
    begins, behind = TOOL_FORMATS[name].begins[0], tokenizer(name).decode(held.behind)
    text = begins[: begins.index(behind)] + behind + tokenizer(name).decode(tokens)
    reasoning = "openai_gptoss" if name == "openai" else None
    return parsed(answer_format(Formats(name, reasoning)), [text], tools)


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_what_a_model_may_write_behind_the_marker_is_calls_of_what_is_offered(name: str) -> None:
    held = constraint(name)
    found = [calls(name, held, tokens) for tokens in written(name)]
    assert len(found) > 4
    for answer in found:
        assert answer.content == ""
        assert answer.names
        for called, arguments in answer.calls:
            jsonschema.validate(arguments, NAMES[called])


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_an_invented_name_is_not_sampled_and_no_value_against_the_schema(name: str) -> None:
    held, speller = constraint(name), tokenizer(name)
    texts = map(speller.decode, written(name))
    text = next(text for text in texts if "get_weather" in text)

    def allowed(text: str) -> bool:
        return follows(held.grammar, speller.encode(text, add_special_tokens=False))

    assert allowed(text)
    city = "Rome" if "Rome" in text else "Oslo"
    for wrong in (
        text.replace("get_weather", "Run_file"),
        text.replace("get_weather", "get_weather_"),
        text.replace(city, "celsius"),
        text.replace("city", "place"),
    ):
        assert wrong != text
        assert not allowed(wrong)
    loose = constraint(name).weaker[0]
    assert loose is not None
    assert follows(loose, speller.encode(text.replace(city, "celsius"), add_special_tokens=False))
    invented = text.replace("get_weather", "Run_file")
    assert not follows(loose, speller.encode(invented, add_special_tokens=False))


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_several_calls_may_come_and_each_of_them_is_held(name: str) -> None:
    """In one section or list, or each with a marker of its own."""
    held = constraint(name)
    assert held.repeats
    counts = {len(calls(name, held, tokens).names) for tokens in written(name)}
    begin = TOOL_FORMATS[name].syntax.begin
    has_marker = tokenizer(name).decode(held.behind) in begin
    assert counts == {1} if has_marker else max(counts) > 1
    alone = constraint(name, parallel_tool_calls=False)
    assert not alone.repeats
    assert alone.weaker[-1:] != (None,)


OPEN = {**CITY, "additionalProperties": {"type": "integer"}}


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_a_function_that_allows_others_may_be_given_parameters_that_are_not_declared(
    name: str,
) -> None:
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": OPEN}}
    held, given = constraint(name, tools=[tool]), set[str]()
    for tokens in filter(None, (walk(held.grammar.text, seed, ['"']) for seed in range(12))):
        for _, arguments in calls(name, held, tokens, {"get_weather": OPEN}).calls:
            jsonschema.validate(arguments, OPEN)
            given |= set(arguments)
    assert given > {"city"}
    assert given - {"city", "days"}


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_no_mask_is_made_before_the_marker_and_one_after_it(name: str) -> None:
    held = constraint(name)
    state = LocalGrammars(DEMO, frozenset({2})).states(Request("r", (1,), 9, constraint=held))()
    for token in (40, 41, 2, *held.behind[:-1]):
        state.accept(token)
        assert state.choice is None
    state.accept(held.behind[-1])
    assert state.choice is not None


def test_grammars_that_are_too_long_are_not_made_into_constraints() -> None:
    """Without a promise the names of parameters are left, or nothing at all."""
    wide = {"type": "object", "properties": {"city": {"enum": [f"{n:09d}" for n in range(3000)]}}}
    many = {"type": "object", "properties": {f"{n:09d}": {} for n in range(3000)}}

    def made(parameters: Mapping[str, Any], **fields: Any) -> Constraint | None:
        function = {"name": "f", "parameters": parameters, "strict": fields.pop("strict", False)}
        tools = [{"type": "function", "function": function}]
        body = {"messages": [{"role": "user", "content": "Hi"}], "tools": tools, **fields}
        chat = as_chat(ChatRequest.model_validate(body))
        settings = ConversationSettings(tool_parser="hermes", reasoning_parser="auto")
        return AnswerPlanner(tokenizer("hermes"), settings).plan(chat, ()).constraint

    held = made(wide)
    assert held is not None
    assert held.weaker == (None,)
    assert not held.grammar.too_long
    assert made(many) is None
    for refused in ({"strict": True}, {"tool_choice": "required"}):
        with pytest.raises(ApiError, match="32768 are the most") as caught:
            made(wide, **refused)
        assert caught.value.param == "tools"
