"""Objects of JSON schemas that are closed unless their schema says otherwise."""

from typing import Any

import pytest

from server.parsing.schemas import closed

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
def test_an_object_with_properties_is_closed(
    schema: dict[str, Any], as_closed: dict[str, Any]
) -> None:
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
    schema: dict[str, Any],
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
