"""Schemas of tools: which types they allow, which of their objects are closed, which a grammar
enforces whole, and that reading them takes bounded work.
"""

import json
from operator import attrgetter
from typing import Any

import pytest

from engine.grammar.worker import compile_grammar
from server.parsing.answer import ToolFormat
from server.parsing.formats.xml_calls import GLM45
from server.parsing.json_schema import (
    closed,
    is_enforced,
    kinds,
)
from server.parsing.lark import (
    MAX_WRITTEN_CHARACTERS,
    Function,
    Lark,
    NotASchema,
    calls_grammar,
)
from server.parsing.parameters import MAX_FOLLOWED_STEPS, MAX_REFERENCE_STEPS, check_work
from server.parsing.registry import TOOL_FORMATS
from tests.grammars import demo_tokenizer

Schema = dict[str, Any]

TEXT = {"type": "string"}
A, B = {"properties": {"a": TEXT}}, {"properties": {"b": TEXT}}
SHUT_A = {**A, "additionalProperties": False}
SHUT_B = {**B, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "as_closed"),
    [
        (A, SHUT_A),
        ({"properties": {}}, {"properties": {}, "additionalProperties": False}),
        ({"items": A}, {"items": SHUT_A}),
        ({"prefixItems": [A]}, {"prefixItems": [SHUT_A]}),
        ({"additionalProperties": A}, {"additionalProperties": SHUT_A}),
        ({"properties": {"in": A}}, {**SHUT_A, "properties": {"in": SHUT_A}}),
        ({"anyOf": [A, B]}, {"anyOf": [SHUT_A, SHUT_B]}),
        ({"type": "object", "allOf": [A]}, {"type": "object", "allOf": [SHUT_A]}),
        ({"$ref": "#/$defs/A", "$defs": {"A": A}}, {"$ref": "#/$defs/A", "$defs": {"A": SHUT_A}}),
        (
            {**A, "anyOf": [{"required": ["a"]}, {"required": []}]},
            {**SHUT_A, "anyOf": [{"required": ["a"]}, {"required": []}]},
        ),
        (
            {**A, "required": ["a", "b"]},
            {**SHUT_A, "properties": {"a": TEXT, "b": {}}, "required": ["a", "b"]},
        ),
        ({**A, "patternProperties": {"^x": B}}, {**SHUT_A, "patternProperties": {"^x": SHUT_B}}),
        (
            {"properties": {"next": {"$ref": "#"}}},
            {"properties": {"next": {"$ref": "#"}}, "additionalProperties": False},
        ),
    ],
)
def test_an_object_with_properties_is_closed(schema: Schema, as_closed: Schema) -> None:
    assert closed(schema) == as_closed


@pytest.mark.parametrize(
    "schema",
    [
        {**A, "additionalProperties": True},
        {**A, "additionalProperties": TEXT},
        {"type": "object"},
        {"allOf": [A, B]},
        {**A, "anyOf": [B, {}]},
        {"required": ["b"], "anyOf": [A, B]},
        {"anyOf": [A, B], "oneOf": [A, B]},
        {**A, "$ref": "#/$defs/B", "$defs": {"B": B}},
        {**A, "required": ["xy"], "patternProperties": {"^x": TEXT}},
        {"properties": ["a"]},
        {"const": A, "enum": [A]},
        {"$ref": "#/nowhere", "items": 5, "anyOf": A, "allOf": ["a"]},
    ],
    ids=str,
)
def test_one_that_says_otherwise_or_is_declared_in_several_places_stays(
    schema: Schema,
) -> None:
    assert closed(schema) == schema


def test_what_one_place_adds_to_is_open_everywhere() -> None:
    """It is one schema, which the others refer to."""
    defs = {"A": A}
    schema = {
        "$defs": defs,
        "items": {"allOf": [{"$ref": "#/$defs/A"}, B]},
        "prefixItems": [{"$ref": "#/$defs/A"}],
    }
    assert closed(schema) == schema


TREE = {
    "type": "object",
    "properties": {"child": {"$ref": "#/$defs/node"}},
    "$defs": {"node": {"type": "object", "properties": {"left": {"$ref": "#/$defs/node"}}}},
}
ENFORCED: list[Schema] = [
    {},
    {"type": "object", "properties": {"a": {"type": ["string", "null"]}}, "required": ["a"]},
    {"type": "object", "additionalProperties": {"type": "integer", "minimum": 1}},
    {"properties": {"a": {"enum": [1, "b", None, True]}, "c": {"const": "d"}}},
    {"properties": {"a": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]}}},
    {"properties": {"a": {"type": "array", "items": {"type": "number"}, "maxItems": 4}}},
    {"properties": {"a": {"title": "A", "description": "B", "default": 5, "examples": [6]}}},
    TREE,
]


@pytest.mark.parametrize("schema", ENFORCED, ids=json.dumps)
def test_what_is_enforced_makes_a_grammar(schema: Schema) -> None:
    assert is_enforced(schema)
    compile_grammar(demo_tokenizer(2), "json_schema", json.dumps(schema))


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"type": "string", "pattern": "a(?=b)"}}},
        {"properties": {"a": {"type": "string", "format": "phone"}}},
        {"properties": {"a": {"type": "text"}}},
        {"properties": {"a": {"$ref": "#/$defs/none"}}},
        {"properties": {"a": {"$ref": "https://example.org/schema"}}},
        {"properties": {"a": {"$ref": "#/$defs/a/properties/b"}}, "$defs": {"a": {}}},
        {"properties": {"a": {"not": {"type": "string"}}}},
        {"properties": {"a": {"type": "array", "uniqueItems": True}}},
        {"properties": {"a": {"enum": []}}},
        {"properties": {"a": {"enum": [1e400]}}},
        {"properties": {"a": {"anyOf": [{"type": "string"}, {"if": {}}]}}},
        {"properties": {"a": "no schema"}},
        {"properties": ["a"]},
        {"required": "a"},
        {"required": [1]},
        {"items": {"oneOf": [{}, {}]}},
    ],
    ids=json.dumps,
)
def test_what_may_not_be_enforced_is_left_loose(schema: Schema) -> None:
    assert not is_enforced(schema)


def test_a_deep_schema_takes_no_recursion() -> None:
    schema: Schema = {}
    for _ in range(5_000):
        schema = {"properties": {"a": schema}}
    assert is_enforced(schema)


@pytest.mark.parametrize(
    ("schema", "allowed"),
    [
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, {"string", "null"}),
        ({"enum": ["a", 1]}, {"string", "integer"}),
        ({"$ref": "#/$defs/a"}, {"boolean"}),
        ({"properties": {}}, {"object"}),
        ({}, set()),
        ({"anyOf": [{"const": str(n)} for n in range(400)]}, {"string"}),
    ],
)
def test_what_a_schema_says(schema: dict[str, object], allowed: set[str]) -> None:
    assert kinds(schema, {"$defs": {"a": {"type": "boolean"}}}) == allowed


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"const": str(n)} for n in range(1000)]},
        {"enum": [str(n) for n in range(1000)]},
        {"anyOf": [{"enum": [str(n) for n in range(500)]} for _ in range(2)]},
    ],
)
def test_what_it_says_at_too_great_length_counts_as_nothing(
    schema: dict[str, list[object]],
) -> None:
    """It is gone through for each value that a model writes, on the event loop."""
    assert kinds(schema, {}) == set()


class CountedReads(dict[str, Any]):
    """A root schema that counts how often a reference is looked up in it."""

    n_reads = 0

    def __getitem__(self, key: str) -> Any:
        self.n_reads += 1
        return super().__getitem__(key)


class CountedName(str):
    """A name that counts how often any of them is compared with another."""

    n_comparisons = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        CountedName.n_comparisons += 1
        return str.__eq__(self, other)


def path(n_steps: int) -> str:
    return "#" + "/a" * n_steps


def nested(n_steps: int) -> Schema:
    """A schema in which `path(n_steps)` leads to a string."""
    schema: Schema = {"type": "string"}
    for _ in range(n_steps):
        schema = {"a": schema}
    return schema


def chain(n_references: int, last: Schema) -> Schema:
    """Definitions of which each but the last refers to the next."""
    linked = {str(n): {"$ref": f"#/$defs/{n + 1}"} for n in range(n_references)}
    return linked | {str(n_references): last}


def test_the_steps_of_one_reference_are_bounded() -> None:
    def schema(n_steps: int) -> Schema:
        return {"properties": {"p": {"items": [{"$ref": path(n_steps)}]}}, **nested(n_steps)}

    check_work([schema(MAX_REFERENCE_STEPS)])
    with pytest.raises(ValueError, match=f"more than {MAX_REFERENCE_STEPS} steps: #/a"):
        check_work([schema(MAX_REFERENCE_STEPS + 1)])


def test_the_steps_of_all_parameters_are_bounded_together() -> None:
    def schema(n_parameters: int) -> Schema:
        shared = {"anyOf": [{"$ref": path(n)} for n in range(MAX_REFERENCE_STEPS)]}
        parameters = {f"p{n}": {"$ref": "#/$defs/shared"} for n in range(n_parameters)}
        return {"properties": parameters, "$defs": {"shared": shared}}

    each = MAX_REFERENCE_STEPS**2 // 2
    few, many = MAX_FOLLOWED_STEPS // each // 3, 2 * MAX_FOLLOWED_STEPS // each
    check_work([schema(few)])
    check_work([schema(few)] * 2)
    for functions in ([schema(many)], [schema(few)] * 4):
        with pytest.raises(ValueError, match=f"more than {MAX_FOLLOWED_STEPS} steps"):
            check_work(functions)


def test_undeclared_parameters_count() -> None:
    alternatives = {"anyOf": [{"const": n} for n in range(MAX_FOLLOWED_STEPS)]}
    with pytest.raises(ValueError, match="steps"):
        check_work([{"additionalProperties": alternatives}])


def test_what_tools_usually_have_is_far_below_the_limit() -> None:
    """The schema of 1,000 functions with 25 parameters each."""
    choice = {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}
    parameters = {f"p{n}": choice if n % 5 == 0 else {"type": "string"} for n in range(25)}
    check_work([{"properties": parameters, "$defs": {"a": {"type": "object"}}}] * 1000)


def test_a_chain_of_references_is_followed_to_its_end() -> None:
    root = {"$defs": chain(100, {"type": "integer"})}
    assert kinds({"$ref": "#/$defs/0"}, root) == {"integer"}


@pytest.mark.parametrize("circle", [{"$ref": "#/$defs/a"}, {"anyOf": [{"$ref": "#/$defs/a"}]}])
def test_a_circle_of_references_allows_any_type(circle: Schema) -> None:
    root = {"properties": {"p": circle}, "$defs": {"a": circle}}
    assert kinds(circle, root) == set()
    any_type: Schema = {"properties": {"p": {}}}
    grammars = [
        calls_grammar(GLM45.syntax, [Function("f", schema)], {}, many=False)
        for schema in (root, any_type)
    ]
    assert grammars[0] == grammars[1]


@pytest.mark.parametrize("n_links", [10, 40])
def test_closing_a_schema_looks_each_reference_up_a_few_times(n_links: int) -> None:
    definitions = chain(n_links, {"type": "object", "properties": {}})
    members = {f"p{n}": {"$ref": "#/$defs/0"} for n in range(100)}
    root = CountedReads({"$defs": definitions, "properties": members})
    closed(root)
    assert 100 <= root.n_reads < 2 * (100 + n_links) + 100


def test_each_reference_of_a_json_grammar_is_looked_up_once() -> None:
    root = CountedReads({"$defs": chain(10, {"type": "string"})})
    root["properties"] = {f"p{n}": {"$ref": "#/$defs/0"} for n in range(100)}
    Lark({}).json(root, root, strict=False)
    assert root.n_reads == 11  # each name once


@pytest.mark.parametrize("format", TOOL_FORMATS.values(), ids=attrgetter("name"))
def test_required_names_are_compared_a_few_times_each(
    format: ToolFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CountedName, "n_comparisons", 0)
    names = [f"p{n}" for n in range(500)]
    schema = {
        "properties": {name: {"type": "string"} for name in names},
        "required": [CountedName(name) for name in names],
    }
    calls_grammar(format.syntax, [Function("f", schema)], {}, many=False)
    assert CountedName.n_comparisons <= 8 * len(names)


def test_definitions_are_not_repeated_without_end() -> None:
    """For each parameter the grammar has all definitions."""
    definitions = {"a": {"type": "object", "description": "x" * (MAX_WRITTEN_CHARACTERS // 64)}}
    members = {f"p{n}": {"items": {"$ref": "#/$defs/a"}} for n in range(100)}
    function = Function("f", {"properties": members, "$defs": definitions})
    with pytest.raises(NotASchema, match=f"more than {MAX_WRITTEN_CHARACTERS} characters"):
        calls_grammar(GLM45.syntax, [function], {}, many=False)
