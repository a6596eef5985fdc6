"""A function's parameters are those of all schemas that apply to its object: a call may have them,
and their types are theirs, in every format.
"""

import json
import random
from collections.abc import Mapping
from typing import Any

import jsonschema
import pytest

from server.parsing.lark import Function, NotASchema, arguments_schema, calls_grammar, names_only
from server.parsing.parameters import MOST_WORK, parameters, shapes
from server.parsing.registry import TOOL_FORMATS, Formats, answer_format
from tests.unit.parsing.answers import parsed
from tests.unit.parsing.walks import MARKERS, allows, text_of, walk

Schema = dict[str, Any]
FORMATS = pytest.mark.parametrize("name", TOOL_FORMATS)

NUMBER: Schema = {
    "type": "object",
    "properties": {"number": {"type": "number", "enum": [4, 2.5]}},
    "required": ["number"],
}
TEXT: Schema = {"type": "object", "properties": {"x": {"type": "string", "enum": ["42", "a b"]}}}
BOTH: Schema = {"$defs": {"N": NUMBER, "T/<T>": TEXT}}
NEEDS_NUMBER: Mapping[str, Schema] = {
    "a reference": {**BOTH, "$ref": "#/$defs/N"},
    "an escaped reference": {"$defs": {"a<b>": NUMBER}, "$ref": "#/$defs/a%3Cb%3E"},
    "all of": {"allOf": [NUMBER, TEXT]},
    "all of references": {**BOTH, "allOf": [{"$ref": "#/$defs/N"}, {"$ref": "#/$defs/T~1<T>"}]},
    "one of one": {"oneOf": [NUMBER]},
    "any of, each with it": {"anyOf": [{"allOf": [NUMBER, TEXT]}, NUMBER]},
    "required elsewhere": {"properties": {}, "allOf": [NUMBER]},
    "types elsewhere": {
        "properties": {"number": {}},
        "required": ["number"],
        "allOf": [{"properties": {"number": {"enum": [4, 2.5]}}}],
    },
    "closed in parts": {"allOf": [{**NUMBER, "additionalProperties": False}, TEXT]},
}
CONTRADICTION = "closed in parts"
"""Generators that know inheritance write it. What one part declares may be given all the same."""
MAY_NUMBER: Mapping[str, Schema] = {
    "any of": {"anyOf": [NUMBER, TEXT]},
    "a pattern": {"patternProperties": {"^numb": {"enum": [4, 2.5]}}},
    "conditions": {"if": TEXT, "then": NUMBER, "else": {"properties": {"y": {"type": "null"}}}},
    "dependent": {**TEXT, "dependentSchemas": {"x": NUMBER}},
    "any object": {"type": "object"},
    "others": {"type": "object", "additionalProperties": {"enum": [4, 2.5]}},
    "a reference that leads nowhere": {"$ref": "#/$defs/N"},
    "many alternatives": {
        "oneOf": [{"properties": {f"p{n}": {}}} for n in range(40)] + [NUMBER],
    },
}


def texts(name: str, function: Function, n: int = 12) -> list[str]:
    grammar = calls_grammar(TOOL_FORMATS[name].syntax, [function], MARKERS, many=False)
    ends = ["</parameter>", "</arg_value>", "</param>", '<|"|>', "<escape>", '"']
    return [text_of(one) for seed in range(n) if (one := walk(grammar, seed, ends)) is not None]


def called(name: str, text: str, schema: Schema) -> dict[str, Any]:
    reasoning = "openai_gptoss" if name == "openai" else None
    answer = parsed(answer_format(Formats(name, reasoning)), [text], {"g": schema})
    assert answer.content == "", text
    [(_, arguments)] = answer.calls
    return dict(arguments)


@pytest.mark.parametrize("case", NEEDS_NUMBER)
@FORMATS
def test_what_a_call_needs_is_written_and_read_wherever_it_is_declared(
    name: str, case: str
) -> None:
    schema = NEEDS_NUMBER[case]
    seen = [called(name, text, schema) for text in texts(name, Function("g", schema))]
    assert seen
    for arguments in seen:
        if case != CONTRADICTION:
            jsonschema.validate(arguments, arguments_schema(Function("g", schema)))
        assert arguments["number"] in (4, 2.5)


@pytest.mark.parametrize("case", MAY_NUMBER)
@FORMATS
def test_what_a_call_may_have_is_allowed_wherever_it_is_declared(name: str, case: str) -> None:
    """Written by a model as its template writes it, it is what the grammar allows."""
    schema = MAY_NUMBER[case]
    plain = {"type": "object", "properties": {"number": {"const": 4}}, "required": ["number"]}
    [text, *_] = texts(name, Function("g", plain), 1)
    assert called(name, text, schema)["number"] in (4, "4")  # some families write text
    for function in (Function("g", schema), names_only(Function("g", schema))):
        grammar = calls_grammar(TOOL_FORMATS[name].syntax, [function], MARKERS, many=False)
        assert allows(grammar, text)


@FORMATS
def test_a_function_without_a_schema_has_no_parameters(name: str) -> None:
    assert [called(name, text, {}) for text in texts(name, Function("g", {}), 4)] == [{}] * 4


TAGGED = {
    "qwen3_coder": "<tool_call>\n<function=g>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n"
    "</tool_call>",
    "glm47": "<tool_call>g<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>",
    "minimax_m2": '<minimax:tool_call><invoke name="g"><parameter name="KEY">VALUE</parameter>'
    "</invoke></minimax:tool_call>",
}


def written(name: str, key: str, value: str) -> str:
    return TAGGED[name].replace("KEY", key).replace("VALUE", value)


@pytest.mark.parametrize("case", [*NEEDS_NUMBER, "any of", "a pattern", "conditions", "others"])
@pytest.mark.parametrize("name", TAGGED)
def test_the_type_of_a_value_is_that_of_all_that_applies(name: str, case: str) -> None:
    schema = {**NEEDS_NUMBER, **MAY_NUMBER}[case]
    assert called(name, written(name, "number", "4"), schema) == {"number": 4}
    if "T" in json.dumps(schema) or "x" in json.dumps(schema):
        assert called(name, written(name, "x", "42"), schema)["x"] in ("42", 42)
    if case in ("all of", "all of references", "any of", "conditions"):
        assert called(name, written(name, "x", "42"), schema) == {"x": "42"}


@pytest.mark.parametrize(
    ("schema", "value", "read"),
    [
        ({"allOf": [{"type": ["string", "number"]}, {"type": "string"}]}, "42", "42"),
        ({"allOf": [{"type": "number"}, {"minimum": 1}]}, "42", 42),
        ({"$ref": "#/$defs/x", "description": "A text."}, "42", "42"),
        ({"type": "string", "anyOf": [{"minLength": 1}, {"pattern": "a"}]}, "42", "42"),
        ({"oneOf": [{"type": "integer"}, {"type": "null"}]}, "null", None),
    ],
)
@pytest.mark.parametrize("name", TAGGED)
def test_a_parameter_is_read_by_all_that_is_said_of_it(
    name: str, schema: Schema, value: str, read: object
) -> None:
    root = {"properties": {"k": schema}, "$defs": {"x": {"type": "string"}}}
    assert called(name, written(name, "k", value), root) == {"k": read}


def random_schema(rng: random.Random, names: list[str], depth: int = 0) -> Schema:
    """A schema that declares some parameters, in some of the ways in which it may."""
    some = {name: {"type": "integer"} for name in names if rng.random() < 0.4}
    schema: Schema = {"type": "object", "properties": some} if rng.random() < 0.7 else {}
    if depth < 3:
        for key in ("allOf", "anyOf", "oneOf"):
            if rng.random() < 0.4:
                n = rng.randint(1, 3)
                schema[key] = [random_schema(rng, names, depth + 1) for _ in range(n)]
        if rng.random() < 0.3:
            schema["if"] = {"required": names[:1]}
            schema["then"] = random_schema(rng, names, depth + 1)
    return schema


def declared(schema: Any) -> set[str]:
    """The names that any part of a schema declares."""
    if isinstance(schema, list):
        return set().union(*map(declared, schema))
    if not isinstance(schema, dict):
        return set()
    own = set(schema.get("properties", {}))
    return own.union(*(declared(value) for key, value in schema.items() if key != "properties"))


@pytest.mark.parametrize("seed", range(150))
def test_no_parameter_that_any_part_declares_is_lost(seed: int) -> None:
    rng = random.Random(seed)
    schema = random_schema(rng, ["a", "b", "c", "d"])
    names = declared(schema)
    assert names <= set(parameters(schema).declared)
    loose = names_only(Function("g", schema))
    assert names <= set(loose.parameters["properties"])


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"properties": {f"p{n}": {} for n in range(MOST_WORK)}}] * 2},
        {"anyOf": [{"properties": {f"p{n}": {}}} for n in range(2000)]},
        {"$ref": "#"},
        {"allOf": [{"$ref": "#"}, {"$ref": "#"}], "properties": {"a": {}}},
    ],
    ids=["wide", "many", "itself", "itself twice"],
)
def test_a_schema_that_says_too_much_allows_more_and_not_less(schema: Schema) -> None:
    assert parameters(schema).undeclared is not False or "a" in parameters(schema).declared


def test_doubled_references_are_followed_once() -> None:
    """Two references in each of 30 definitions are a thousand million paths."""
    chain: Schema = {
        str(n): {"allOf": [{"$ref": f"#/$defs/{n + 1}"}, {"$ref": f"#/$defs/{n + 1}"}]}
        for n in range(30)
    }
    root = {"$ref": "#/$defs/0", "$defs": {**chain, "30": NUMBER}}
    assert parameters(root).required == ["number"]


NOTATIONS = [*TAGGED, "gemma4", "pythonic"]


@pytest.mark.parametrize("case", ["conditions", "dependent", "many alternatives"])
@pytest.mark.parametrize("name", NOTATIONS)
def test_a_strict_function_that_cannot_be_enforced_is_refused(name: str, case: str) -> None:
    function = Function("g", MAY_NUMBER[case], strict=True)
    with pytest.raises(NotASchema, match="cannot be enforced"):
        calls_grammar(TOOL_FORMATS[name].syntax, [function], MARKERS, many=False)


@pytest.mark.parametrize("case", ["a reference", "all of", "any of, each with it"])
@pytest.mark.parametrize("name", NOTATIONS)
def test_a_strict_function_may_be_declared_in_parts(name: str, case: str) -> None:
    function = Function("g", NEEDS_NUMBER[case], strict=True)
    assert texts(name, function, 3)


@pytest.mark.parametrize("n", [2, 3, 6, 12, 40])
def test_each_of_several_conditions_has_its_parameters(n: int) -> None:
    names = [f"p{number}" for number in range(n)]
    conditions = [
        {
            "if": {"properties": {"kind": {"const": name}}},
            "then": {"properties": {name: {"type": "number"}}, "required": [name]},
        }
        for name in names
    ]
    schema = {"type": "object", "properties": {"kind": {}}, "allOf": conditions}
    assert set(parameters(schema).declared) == {"kind", *names}
    assert {name for shape in shapes(schema) for name in shape.declared} == {"kind", *names}
