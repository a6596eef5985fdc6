"""What the grammars of families with a syntax of their own allow parses to calls that conform."""

from typing import Any

import jsonschema
import pytest

from server.parsing.answer import MarkedFormat, ToolFormat
from server.parsing.formats import harmony
from server.parsing.formats.literal_calls import FUNCTION_GEMMA, GEMMA4, LFM2, PYTHONIC
from server.parsing.lark import Function, arguments_schema, calls_grammar
from server.parsing.registry import AnswerFormat
from tests.unit.parsing.answers import parsed
from tests.unit.parsing.walks import text_of, walk

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
                "tags": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["hourly"],
            "additionalProperties": False,
        },
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "code": {"type": "string", "pattern": "^[a-c]{2,3}$"},
        "a, key": {"type": ["integer", "null"]},
        "place": {"$ref": "#/$defs/Place"},
        "more": {},
    },
    "required": ["options", "code"],
    "$defs": {
        "Place": {
            "type": "object",
            "properties": {"level": {"enum": ["low", 1]}},
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
TOOLS = {function.name: function.parameters for function in FUNCTIONS}
ENDS = ['"', '<|"|>', "<escape>"]

FORMATS: dict[str, tuple[ToolFormat, AnswerFormat]] = {
    format.name: (format, MarkedFormat(None, format))
    for format in (GEMMA4, FUNCTION_GEMMA, LFM2, PYTHONIC)
} | {harmony.TOOLS.name: (harmony.TOOLS, harmony.Harmony(harmony.TOOLS))}


def check(name: str, text: str, many: bool) -> int:
    answer = parsed(FORMATS[name][1], text, TOOLS)
    assert answer.content == ""
    assert answer.names
    assert many or len(answer.names) == 1
    for function, arguments in answer.calls:
        jsonschema.validate(arguments, SCHEMAS[function])
    return len(answer.names)


@pytest.mark.parametrize("many", [False, True], ids=["one", "many"])
@pytest.mark.parametrize("name", list(FORMATS))
def test_what_a_grammar_allows_is_calls_that_conform(name: str, many: bool) -> None:
    grammar = calls_grammar(FORMATS[name][0].syntax, FUNCTIONS, {}, many=many)
    walks = [walk(grammar, seed, ENDS) for seed in range(12)]
    texts = [text_of(tokens) for tokens in walks if tokens is not None]
    assert len(texts) >= 4
    counts = [check(name, text, many) for text in texts]
    assert (max(counts) > 1) is many


@pytest.mark.parametrize("name", list(FORMATS))
def test_a_grammar_may_begin_behind_the_marker(name: str) -> None:
    format, _ = FORMATS[name]
    marker = "[" if format is PYTHONIC else format.begins[0]
    grammar = calls_grammar(format.syntax, FUNCTIONS, {}, many=False, behind=marker)
    walks = [walk(grammar, seed, ENDS) for seed in range(4)]
    texts = [text_of(tokens) for tokens in walks if tokens is not None]
    assert texts
    for text in texts:
        check(name, marker + text, False)


def test_quotes_may_be_special_tokens() -> None:
    """The demonstration model's stand for Gemma's."""
    special = {"<|tool_call>": 1022, '<|"|>': 1023}
    grammar = calls_grammar(GEMMA4.syntax, FUNCTIONS, special, many=True)
    walks = [walk(grammar, seed, ['"', 1023]) for seed in range(12)]
    found = [tokens for tokens in walks if tokens is not None]
    assert len(found) >= 4
    assert any(1023 in tokens for tokens in found)
    for tokens in found:
        text = text_of(tokens)
        for name, token in special.items():
            text = text.replace(text_of([token]), name)
        check("gemma4", text, True)
