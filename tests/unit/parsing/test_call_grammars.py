"""Grammars of calls, by format: what they allow is calls that conform to the tools' schemas. Under
`auto` they hold from the marker on, in every format whose marker begins with a token of its own.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import jsonschema
import pytest

from engine.values.request import (
    MAX_GRAMMAR_CHARACTERS,
    Constraint,
    Grammar,
    GrammarKind,
    Request,
)
from engine.values.tokens import pack
from server.dialects.chat.routes import as_chat
from server.dialects.chat.schema import ChatRequest
from server.errors import ApiError
from server.generation.plan import AnswerPlanner
from server.parsing.lark import Function, Lark, arguments_schema, calls_grammar
from server.parsing.registry import TOOL_FORMATS, Formats, answer_format
from server.settings.models import ConversationSettings
from tests.contract.fake_engine import ByteTokenizer
from tests.grammars import LocalGrammars, demo_tokenizer
from tests.unit.parsing.answers import Answer, parsed
from tests.unit.parsing.walks import text_of, walk

FORMATS = pytest.mark.parametrize("name", TOOL_FORMATS)
STAND_INS = (1022, 1023)
"""The demonstration model's <tool_call> and </tool_call>, which stand for other families' too."""

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1},
        "unit": {"type": "string", "enum": ["c", "degrees f"]},
        "options": {
            "type": "object",
            "properties": {
                "hourly": {"type": "boolean"},
                "tags": {"type": "array", "items": {"enum": ["a", "b c"], "type": "string"}},
            },
            "required": ["hourly"],
            "additionalProperties": False,
        },
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "level": {"$ref": "#/$defs/Level"},
        "step": {"enum": [1, "one", None]},
        "hour": {"type": ["integer", "null"]},
        "code": {"type": "string", "pattern": "^[a-c]{2,3}$"},
        "word": {"type": "string", "pattern": "a/b", "minLength": 4, "maxLength": 9},
        "place": {"$ref": "#/$defs/Place"},
        "more": {},
    },
    "required": ["options", "code"],
    "$defs": {
        "Level": {"enum": ["low", 1]},
        "Place": {
            "type": "object",
            "properties": {"level": {"$ref": "#/$defs/Level"}},
            "required": ["level"],
            "additionalProperties": False,
        },
    },
}
OPTIONAL = {"properties": {"x": {"type": "integer"}, "y": {"type": "boolean"}, "z": False}}
FUNCTIONS = [
    Function("weather", WEATHER, strict=True),
    Function("ping", {}),
    Function("move", OPTIONAL),
]
SCHEMAS = {function.name: arguments_schema(function) for function in FUNCTIONS}
ENDS: Mapping[str, Sequence[str]] = {
    "qwen3_coder": ["</parameter>"],
    "seed_oss": ["</parameter>"],
    "mimo": ["</parameter>"],
    "solar_open2": ["<|tool_arg:end|>"],
    "glm47": ["</arg_value>"],
    "glm45": ["</arg_value>"],
    "laguna": ["</arg_value>"],
    "longcat": ["</longcat_arg_value>"],
    "minimax_m2": ["</parameter>"],
    "muse_spark": ["</atem:parameter>"],
    "minicpm5": ["</param>", "]]>"],
    "minimax_m3": ["]<]minimax[>[</"],
    "deepseek_v32": ["</｜DSML｜parameter>"],
    "deepseek_v41": ["</｜DSML｜ parameter>"],
    "gigachat35": ["</｜GCML｜parameter>"],
    "kimi_k3": ["<|close|>argument<|sep|>"],
    "gemma4": ['<|"|>'],
    "functiongemma": ["<escape>"],
}
"""What ends a string, other than its quote."""
IN_THEIR_OWN_NOTATION = ("gemma4", "functiongemma", "minimax_m3")
"""Families that write an object otherwise than as JSON."""


def texts_of(grammar: str, n: int, closes: Sequence[str | int]) -> list[str]:
    walks = (walk(grammar, seed, [*closes, '"']) for seed in range(n))
    return [text_of(tokens) for tokens in walks if tokens is not None]


def check(name: str, text: str, schemas: Mapping[str, Any], tools: Mapping[str, Any]) -> Answer:
    """The answer, which is calls that conform."""
    reasoning = "openai_gptoss" if name == "openai" else None
    answer = parsed(answer_format(Formats(name, reasoning)), [text], tools)
    assert answer.content == "", text
    assert answer.names
    for called, arguments in answer.calls:
        jsonschema.validate(arguments, schemas[called])
    return answer


def check_weather(name: str, text: str) -> int:
    tools = {function.name: function.parameters for function in FUNCTIONS}
    return len(check(name, text, SCHEMAS, tools).names)


@pytest.mark.parametrize("many", [False, True], ids=["one", "many"])
@FORMATS
def test_what_a_grammar_allows_is_calls_that_conform(name: str, many: bool) -> None:
    special = dict(zip(("<tool_call>", "</tool_call>"), STAND_INS, strict=True))
    grammar = calls_grammar(TOOL_FORMATS[name].syntax, FUNCTIONS, special, many=many)
    texts = texts_of(grammar, 14, ENDS.get(name, []))
    assert len(texts) >= 4
    counts = {check_weather(name, text) for text in texts}
    assert (max(counts) > 1) is many


@pytest.mark.parametrize("name", [name for name in ENDS if name not in IN_THEIR_OWN_NOTATION])
def test_the_end_tag_inside_a_json_string_is_text(name: str) -> None:
    """Where an object stands between tags, its strings may have any text, which comes back."""
    end = ENDS[name][0]
    note = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
    parameters = {"properties": {"note": note, "day": {"type": "integer"}}, "required": ["note"]}
    function = Function("f", parameters, strict=True)
    special = dict(zip(("<tool_call>", "</tool_call>"), STAND_INS, strict=True))
    grammar = calls_grammar(TOOL_FORMATS[name].syntax, [function], special, many=True)
    schemas = {"f": arguments_schema(function)}
    texts = [text for text in texts_of(grammar, 14, [end]) if "note" in text]
    said = [
        arguments["note"]["text"]
        for text in texts
        for _, arguments in check(name, text, schemas, {"f": parameters}).calls
    ]
    assert any(end in text for text in said)
    assert any(end not in text for text in said)


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_broken_value_between_tags_ends_at_the_first_end_tag(size: int) -> None:
    """As of a model that no grammar holds: a string without its quote, then other parameters."""
    tag = "<arg_key>{}</arg_key><arg_value>{}</arg_value>".format
    parameters = [tag("a", '{"x": "y'), tag("b", '["</arg_value>"]'), tag("c", "[1]")]
    text = f"<tool_call>f{''.join(parameters)}</tool_call>Done."
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    answer = parsed(answer_format(Formats("glm47", None)), pieces, {"f": {}})
    assert answer.calls == [("f", {"a": '{"x": "y', "b": '["', "c": [1]})]
    assert answer.content == "Done."


@pytest.mark.parametrize(
    ("name", "marks", "closes"),
    [
        ("deepseek_v32", {"｜DSML｜": 1022}, ["</"]),
        ("kimi_k3", {"<|open|>": 1022, "<|close|>": 1023}, [1023]),
        ("gemma4", {"<|tool_call>": 1022, '<|"|>': 1023}, [1023]),
    ],
)
def test_marks_inside_of_a_call_may_be_special_tokens(
    name: str, marks: Mapping[str, int], closes: list[str | int]
) -> None:
    """A text that one of them ends is among the arguments."""
    [weather, *_] = FUNCTIONS
    in_city = replace(weather, parameters=WEATHER | {"required": [*WEATHER["required"], "city"]})
    grammar = calls_grammar(TOOL_FORMATS[name].syntax, [in_city], marks, many=False)
    texts = texts_of(grammar, 10, closes)
    assert texts
    spelled = {text_of([token]): mark for mark, token in marks.items()}
    for text in texts:
        as_written = re.sub("</?tool_call>", lambda found: spelled[found[0]], text)
        assert check_weather(name, as_written) == 1


def test_after_a_marker_the_grammar_begins_with_what_follows_it() -> None:
    special = dict(zip(("<tool_call>", "</tool_call>"), STAND_INS, strict=True))
    marker = TOOL_FORMATS["qwen3_coder"].begins[0]
    syntax = TOOL_FORMATS["qwen3_coder"].syntax
    (text,) = texts_of(
        calls_grammar(syntax, FUNCTIONS[1:2], special, many=False, behind=marker), 1, []
    )
    assert text == "\n<function=ping>\n</function>\n</tool_call>"


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
            before, found, after = text.partition(name)
            if found:
                more = self.encode(after, add_special_tokens=False)
                return [*self.encode(before, add_special_tokens=False), token, *more]
        return DEMO.tokenize_str(text) if text else []

    def decode(self, token_ids: Sequence[int]) -> str:
        names = {token: name.encode() for name, token in self.added_tokens.items()}
        pieces = [names.get(token) or DEMO.decode_bytes([token]) for token in token_ids]
        return b"".join(pieces).decode()


def tokenizer(name: str) -> SpecialTokenizer:
    special = SPECIAL.get(name, [TOOL_FORMATS[name].begins[0], "</tool_call>"])
    return SpecialTokenizer(added_tokens=dict(zip(special, STAND_INS, strict=False)))


def planned(name: str, **fields: Any) -> Constraint | None:
    """What a chat request with tools is constrained by."""
    settings = ConversationSettings(tool_parser=name, reasoning_parser="auto")
    messages = [{"role": "user", "content": "Hi"}]
    body = as_chat(
        ChatRequest.model_validate({"messages": messages, "tools": TOOLS, **fields}), reasons=True
    )
    return AnswerPlanner(tokenizer(name), settings).plan(body, ()).constraint


def constraint(name: str, **fields: Any) -> Constraint:
    made = planned(name, **fields)
    assert made is not None
    return made


@cache
def written(name: str) -> list[list[int]]:
    """What a model may write after the marker."""
    walks = (walk(constraint(name).grammar.text, seed, ['"']) for seed in range(24))
    return [tokens for tokens in walks if tokens is not None]


def follows(grammar: Grammar, tokens: Sequence[int]) -> bool:
    matcher = LocalGrammars(DEMO, frozenset()).matcher(grammar)
    return bool(matcher.validate_tokens(list(tokens)) == len(tokens))


def calls(
    name: str, held: Constraint, tokens: Sequence[int], tools: Mapping[str, Any] = NAMES
) -> Answer:
    """What a client gets of a text that begins with the marker: calls that conform."""
    begins, after = TOOL_FORMATS[name].begins[0], tokenizer(name).decode(held.behind)
    text = begins[: begins.index(after)] + after + tokenizer(name).decode(tokens)
    return check(name, text, tools, tools)


@FORMATS
def test_what_may_follow_the_marker_is_calls_of_what_is_offered_each_of_them_held(
    name: str,
) -> None:
    """Several come in one section or list, or each with a marker of its own."""
    held = constraint(name)
    assert held.repeats
    counts = [len(calls(name, held, tokens).names) for tokens in written(name)]
    assert len(counts) > 4
    has_marker = tokenizer(name).decode(held.behind) in TOOL_FORMATS[name].syntax.begin
    assert set(counts) == {1} if has_marker else max(counts) > 1
    alone = constraint(name, parallel_tool_calls=False)
    assert not alone.repeats
    assert alone.weaker[-1:] != (None,)


@FORMATS
def test_an_invented_name_is_not_sampled_and_no_value_against_the_schema(name: str) -> None:
    held, speller = constraint(name), tokenizer(name)
    texts = map(speller.decode, written(name))
    text = next(text for text in texts if "get_weather" in text)

    def allowed(grammar: Grammar, text: str) -> bool:
        return follows(grammar, speller.encode(text, add_special_tokens=False))

    assert allowed(held.grammar, text)
    invented = text.replace("get_weather", "Run_file")
    other_value = text.replace("Rome" if "Rome" in text else "Oslo", "celsius")
    for wrong in (
        invented,
        other_value,
        text.replace("get_weather", "get_weather_"),
        text.replace("city", "place"),
    ):
        assert wrong != text
        assert not allowed(held.grammar, wrong)
    loose = held.weaker[0]
    assert loose is not None
    assert allowed(loose, other_value)
    assert not allowed(loose, invented)


OPEN = {**CITY, "additionalProperties": {"type": "integer"}}


@FORMATS
def test_a_function_that_allows_others_may_be_given_parameters_that_are_not_declared(
    name: str,
) -> None:
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": OPEN}}
    held, given = constraint(name, tools=[tool]), set[str]()
    closes = ['"', "/invoke>"]  # after `<` chance would write the name of one more parameter
    for tokens in filter(None, (walk(held.grammar.text, seed, closes) for seed in range(12))):
        for _, arguments in calls(name, held, tokens, {"get_weather": OPEN}).calls:
            given |= set(arguments)
    assert given > {"city"}
    assert given - {"city", "days"}


@FORMATS
def test_no_mask_is_made_before_the_marker_and_one_after_it(name: str) -> None:
    held = constraint(name)
    state = LocalGrammars(DEMO, frozenset({2})).states(
        Request("r", pack((1,)), 9, constraint=held)
    )()
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
        return planned("hermes", tools=[{"type": "function", "function": function}], **fields)

    held = made(wide)
    assert held is not None
    assert held.weaker == (None,)
    assert not held.grammar.too_long
    assert made(many) is None
    for refused in ({"strict": True}, {"tool_choice": "required"}):
        with pytest.raises(ApiError, match="32768 are the most") as caught:
            made(wide, **refused)
        assert caught.value.param == "tools"


ABOUT = "What it is for, when it is to be left out, and what becomes of it then. " * 4


def described(kind: str) -> Mapping[str, Any]:
    return {"type": kind, "title": "Title", "description": ABOUT, "$comment": ABOUT}


@FORMATS
def test_many_tools_with_long_descriptions_make_a_grammar_that_is_not_too_long(name: str) -> None:
    def tool(index: int) -> Function:
        named = {f"{name}_{index}": described("string") for name in ("owner", "place", "body")}
        properties = {**named, "title": described("string"), "description": described("integer")}
        parameters = {"type": "object", "properties": properties, "required": ["description"]}
        return Function(f"do_{index}", {**parameters, "description": ABOUT}, strict=True)

    tools = [tool(index) for index in range(48)]
    grammar = calls_grammar(TOOL_FORMATS[name].syntax, tools, {}, many=True)
    assert len(grammar) <= MAX_GRAMMAR_CHARACTERS[GrammarKind.LARK]


@pytest.mark.parametrize("strict", [False, True])
def test_parameters_that_are_called_as_what_describes_them_stay(strict: bool) -> None:
    constants = {"title": {"const": "Köln"}, "description": {"const": {"title": "x"}}}
    parameters = {"properties": constants, "required": ["title", "description"]}
    function = Function("f", parameters, strict)
    grammar = calls_grammar(TOOL_FORMATS["mistral_args"].syntax, [function], {}, many=False)
    (text,) = texts_of(grammar, 1, [])
    assert text == '[TOOL_CALLS]f[ARGS]{"title": "Köln", "description": {"title": "x"}}'


@FORMATS
def test_added_tokens_that_no_call_spells_change_nothing(name: str) -> None:
    own = tokenizer(name).added_tokens
    many = {**{f"<unused{at}>": 5000 + at for at in range(6000)}, **own}
    functions = [Function("get_weather", WEATHER), Function("f", {}, strict=True)]
    syntax = TOOL_FORMATS[name].syntax
    grammar = calls_grammar(syntax, functions, many, many=True)
    assert grammar == calls_grammar(syntax, functions, own, many=True)


def test_of_added_tokens_that_begin_alike_the_longest_is_meant() -> None:
    lark = Lark({"<a": 1, "<a>": 2, "b": 3})
    assert lark.text("x<a>y<a b") == '"x" <[2]> "y" <[1]> " " <[3]>'
    assert lark.text("") == ""


@FORMATS
def test_a_planner_writes_the_grammar_of_the_same_tools_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent sends its tools with each turn."""
    n_written = 0

    def counted(*arguments: Any, **options: Any) -> str:
        nonlocal n_written
        n_written += 1
        return calls_grammar(*arguments, **options)

    monkeypatch.setattr("server.generation.plan.calls_grammar", counted)
    settings = ConversationSettings(tool_parser=name, reasoning_parser="auto")
    planner = AnswerPlanner(tokenizer(name), settings)

    def constraint_of(description: str, said: str) -> Constraint | None:
        tool = {"name": "look", "description": description, "parameters": WEATHER}
        fields = {
            "messages": [{"role": "user", "content": said}],
            "tools": [{"type": "function", "function": tool}],
            "tool_choice": "required",
        }
        return planner.plan(
            as_chat(ChatRequest.model_validate(fields), reasons=True), ()
        ).constraint

    first = constraint_of("Look.", "Hi")
    assert first is not None
    assert constraint_of("Look again.", "And then?") == first
    assert n_written == 1
