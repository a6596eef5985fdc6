"""Which schemas a grammar is known to enforce whole: the others stay as loose as they were."""

import json
from typing import Any

import pytest

from engine.grammar.worker import compile_grammar
from server.parsing.schemas import is_enforced
from tests.grammars import demo_tokenizer

TREE = {
    "type": "object",
    "properties": {"child": {"$ref": "#/$defs/node"}},
    "$defs": {"node": {"type": "object", "properties": {"left": {"$ref": "#/$defs/node"}}}},
}
ENFORCED: list[dict[str, Any]] = [
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
def test_what_is_enforced_makes_a_grammar(schema: dict[str, Any]) -> None:
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
def test_what_may_not_be_enforced_is_left_loose(schema: dict[str, Any]) -> None:
    assert not is_enforced(schema)


def test_a_deep_schema_takes_no_recursion() -> None:
    schema: dict[str, Any] = {}
    for _ in range(5_000):
        schema = {"properties": {"a": schema}}
    assert is_enforced(schema)
