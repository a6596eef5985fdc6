"""What the grammars of typed families allow parses to calls that conform to their schemas."""

import re
from typing import Any

import jsonschema
import pytest

from server.parsing.answer import MarkedFormat, ToolFormat
from server.parsing.formats import xml_calls
from server.parsing.lark import Function, arguments_schema, calls_grammar
from tests.unit.parsing.answers import parsed
from tests.unit.parsing.walks import text_of, walk

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1},
        "unit": {"type": "string", "enum": ["c", "f"]},
        "options": {
            "type": "object",
            "properties": {"hourly": {"type": "boolean"}},
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
    "required": ["city", "options", "code"],
    "$defs": {
        "Level": {"enum": ["low", "high"]},
        "Place": {
            "type": "object",
            "properties": {"level": {"$ref": "#/$defs/Level"}},
            "required": ["level"],
            "additionalProperties": False,
        },
    },
}
FUNCTIONS = [Function("weather", WEATHER, strict=True), Function("ping", {})]
SCHEMAS = {function.name: arguments_schema(function) for function in FUNCTIONS}
TOOLS = {function.name: function.parameters for function in FUNCTIONS}
ENDS = {
    "qwen3_coder": ["</parameter>"],
    "glm47": ["</arg_value>"],
    "glm45": ["</arg_value>"],
    "laguna": ["</arg_value>"],
    "longcat": ["</longcat_arg_value>"],
    "minimax_m2": ["</parameter>"],
    "muse_spark": ["</atem:parameter>"],
    "minicpm5": ["</param>", "]]>"],
    "deepseek_v32": ["</｜DSML｜parameter>"],
    "kimi_k3": ["<|close|>argument<|sep|>"],
}
TOOL_CALL = {"<tool_call>": 1022, "</tool_call>": 1023}
"""The demonstration model's special tokens, which stand for other families' too."""

FORMATS = {
    format.name: format for format in vars(xml_calls).values() if isinstance(format, ToolFormat)
}


@pytest.mark.parametrize("many", [False, True], ids=["one", "many"])
@pytest.mark.parametrize("name", list(FORMATS))
def test_what_a_grammar_allows_is_calls_that_conform(name: str, many: bool) -> None:
    grammar = calls_grammar(FORMATS[name].syntax, FUNCTIONS, TOOL_CALL, many=many)
    walks = [walk(grammar, seed, [*ENDS[name], '"']) for seed in range(8)]
    texts = [text_of(tokens) for tokens in walks if tokens is not None]
    assert len(texts) >= 4
    for text in texts:
        check(name, text, many)


@pytest.mark.parametrize(
    ("name", "special", "closes"),
    [
        ("deepseek_v32", ["｜DSML｜"], ["</"]),
        ("kimi_k3", ["<|open|>", "<|close|>"], [1023]),
    ],
)
def test_marks_inside_of_a_call_may_be_special_tokens(
    name: str, special: list[str], closes: list[str | int]
) -> None:
    marks = dict(zip(TOOL_CALL, special, strict=False))
    ids = {mark: TOOL_CALL[shown] for shown, mark in marks.items()}
    grammar = calls_grammar(FORMATS[name].syntax, FUNCTIONS[:1], ids, many=False)
    walks = [walk(grammar, seed, [*closes, '"']) for seed in range(8)]
    texts = [text_of(tokens) for tokens in walks if tokens is not None]
    assert texts
    for text in texts:
        written = re.sub("</?tool_call>", lambda shown: marks[shown[0]], text)
        check(name, written, many=False)


def test_behind_a_marker_the_grammar_begins_with_what_follows_it() -> None:
    marker = xml_calls.QWEN3_CODER.begins[0]
    grammar = calls_grammar(
        xml_calls.QWEN3_CODER.syntax, FUNCTIONS[1:], TOOL_CALL, many=False, behind=marker
    )
    tokens = walk(grammar, 0, [])
    assert tokens is not None
    assert text_of(tokens) == "\n<function=ping>\n</function>\n</tool_call>"


def check(name: str, text: str, many: bool) -> None:
    answer = parsed(MarkedFormat(None, FORMATS[name]), [text], TOOLS)
    assert not answer.content, text
    assert many or len(answer.names) == 1
    assert answer.names
    for function, arguments in answer.calls:
        jsonschema.validate(arguments, SCHEMAS[function])
