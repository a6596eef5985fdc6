"""Which types a schema allows."""

import pytest

from server.parsing.schemas import kinds


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
