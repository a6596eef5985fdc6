"""`dependentRequired`, `dependentSchemas` and `dependencies` as alternatives.

Grammars have no form for "if this property is there". An object lacks the property, or it conforms
to what depends on it; either holds for whatever is no object, as do those keywords.
"""

from collections.abc import Iterator, Mapping
from typing import Any

KEYWORDS = ("dependentRequired", "dependentSchemas", "dependencies")
MOST_DEPENDENCIES = 4
"""Of one schema: each doubles the alternatives that an object has."""


def as_alternatives(schema: dict[str, Any]) -> dict[str, Any]:
    """An equal schema without dependencies; the same one where they are too many, or of no form."""
    if schema.keys().isdisjoint(KEYWORDS):
        return schema
    put, others = list(_put(schema)), schema.get("allOf", [])
    if None in put or len(put) > MOST_DEPENDENCIES or not isinstance(others, list):
        return schema
    rest = {key: value for key, value in schema.items() if key not in KEYWORDS}
    return {**rest, "allOf": [*others, *put]}


def _put(schema: Mapping[str, Any]) -> Iterator[dict[str, Any] | None]:
    """One schema for each dependency; None for one that is neither names nor a schema."""
    for keyword in KEYWORDS:
        dependencies = schema.get(keyword, {})
        if not isinstance(dependencies, Mapping):
            yield None
            continue
        for name, stated in dependencies.items():
            is_list = isinstance(stated, list) and all(isinstance(one, str) for one in stated)
            needed = {"required": stated} if is_list else stated
            is_schema = isinstance(needed, Mapping | bool)
            yield {"anyOf": [{"properties": {name: False}}, needed]} if is_schema else None
