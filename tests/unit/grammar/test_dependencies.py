"""What a property needs is enforced, for as many properties as a grammar can hold apart."""

import itertools
import json
from typing import Any

import jsonschema
import pytest

from engine.grammar.worker import GrammarError, compile_grammar
from tests.grammars import demo_tokenizer

TOKENIZER = demo_tokenizer(2)
NAMES = "abc"


def allows(schema: object, value: object) -> bool:
    matcher = compile_grammar(TOKENIZER, "json_schema", json.dumps(schema))
    tokens = TOKENIZER.tokenize_str(json.dumps(value))
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


@pytest.mark.parametrize("more", [{}, {"additionalProperties": False}, {"type": "object"}])
@pytest.mark.parametrize(
    "depends",
    [
        {"dependentRequired": {"a": ["b"]}},
        {"dependencies": {"a": ["b", "c"], "b": ["c"]}},
        {"dependentSchemas": {"a": {"properties": {"b": {"type": "string"}}}}},
        {"dependencies": {"a": {"required": ["c"]}, "b": ["a"]}},
        {"dependentRequired": {"a": ["b"], "b": ["a"]}},
        {"dependentSchemas": {"a": False, "b": True}},
        {"dependentRequired": {"a": []}, "dependentSchemas": {"b": {"required": ["a"]}}},
    ],
)
def test_what_a_property_needs_is_enforced(depends: dict[str, Any], more: dict[str, Any]) -> None:
    schema = {"properties": {name: {"type": ["integer", "string"]} for name in NAMES}}
    schema |= depends | more
    is_valid = jsonschema.Draft202012Validator(schema).is_valid
    if "dependencies" in depends:
        is_valid = jsonschema.Draft7Validator(schema).is_valid
    for values in itertools.product((1, "x", None), repeat=3):
        value = {name: one for name, one in zip(NAMES, values, strict=True) if one is not None}
        assert allows(schema, value) is is_valid(value), value
    for other in (1, "x", None, [1]):
        assert allows(schema, other) is is_valid(other), other


@pytest.mark.parametrize("count", [4, 5])
def test_more_are_refused(count: int) -> None:
    schema = {"type": "object", "dependentRequired": {f"a{n}": ["b"] for n in range(count)}}
    if count == 4:
        assert allows(schema, {"b": 2, "a1": 1})
        assert not allows(schema, {"a1": 1})
    else:
        with pytest.raises(GrammarError, match="dependentRequired"):
            allows(schema, {})
