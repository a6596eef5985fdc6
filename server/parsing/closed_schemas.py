"""JSON schemas whose objects have the members that they declare, and no others.

JSON Schema lets an object have any other member unless it forbids them; a small model goes on
inventing some. OpenAI's strict mode and vLLM read schemas as closed, too.
"""

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from server.parsing.typed_values import target

Schema: TypeAlias = Mapping[str, Any]

_BRANCHES = ("allOf", "anyOf", "oneOf")
_MEMBERS = ("properties", "patternProperties")
_VALUES = ("items", "additionalProperties", "additionalItems")
_OF_OBJECTS = frozenset({*_MEMBERS, "required", "additionalProperties"})
_SAYS_OTHERWISE = frozenset(
    {"additionalProperties", "unevaluatedProperties", "$ref"}
    | {"if", "dependentSchemas", "dependencies"}
)
_DECLARES = frozenset({*_MEMBERS, *_SAYS_OTHERWISE, *_BRANCHES})


def closed(schema: Schema) -> dict[str, Any]:
    """The schema, in which an object with `properties` has no others unless it says so.

    An object whose members are declared in several places (`allOf`, or `properties` beside `anyOf`
    or `$ref`) is left as it is: each place would forbid what the others declare.
    """
    whole, in_parts = set[int](), set[int]()
    for one, is_part in _reached(schema):
        (in_parts if is_part else whole).add(id(one))
    rebuilt: dict[str, Any] = _rebuilt(schema, whole - in_parts)
    return rebuilt


def _reached(root: Schema) -> Iterator[tuple[Schema, bool]]:
    """The schemas that count, and whether others say more about the same value."""
    waiting: list[tuple[Any, bool]] = [(root, False)]
    seen = set[tuple[int, bool]]()
    while waiting:
        schema, is_part = waiting.pop()
        if not isinstance(schema, Mapping) or (id(schema), is_part) in seen:
            continue
        seen.add((id(schema), is_part))
        yield schema, is_part
        places = list(_same_value(schema, root))
        beside = is_part or len(places) > 1 or not _OF_OBJECTS.isdisjoint(schema)
        waiting += [(one, beside) for place in places for one in place]
        waiting += [(one, False) for one in _inner(schema)]


def _same_value(schema: Schema, root: Schema) -> Iterator[list[Any]]:
    """Schemas that a value conforms to as well: for each place, the alternatives."""
    if isinstance(schema.get("$ref"), str):
        yield [target(schema["$ref"], root)]
    for key in _BRANCHES:
        if branches := _list(schema, key):
            yield from [[one] for one in branches] if key == "allOf" else [branches]


def _inner(schema: Schema) -> Iterator[Any]:
    """The schemas of members and items."""
    for key in _MEMBERS:
        if isinstance(members := schema.get(key), Mapping):
            yield from members.values()
    for key in _VALUES:
        yield schema.get(key)
    for key in ("items", "prefixItems"):
        yield from _list(schema, key)


def _rebuilt(schema: Any, to_close: set[int]) -> Any:
    if isinstance(schema, list):
        return [_rebuilt(one, to_close) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    rebuilt = {key: _rebuilt(value, to_close) for key, value in schema.items()}
    if id(schema) in to_close and isinstance(schema.get("properties"), Mapping):
        return _closed_object(rebuilt)
    return rebuilt


def _closed_object(schema: dict[str, Any]) -> Schema:
    """Members that are required count as declared."""
    branches = [one for key in _BRANCHES for one in _list(schema, key)]
    if not _SAYS_OTHERWISE.isdisjoint(schema) or not all(map(_declares_nothing, branches)):
        return schema
    required = [name for name in _list(schema, "required") if isinstance(name, str)]
    undeclared: dict[str, Schema] = {
        name: {} for name in required if name not in schema["properties"]
    }
    if undeclared and "patternProperties" in schema:
        return schema
    properties = {**schema["properties"], **undeclared}
    return {**schema, "properties": properties, "additionalProperties": False}


def _declares_nothing(branch: object) -> bool:
    """As one does that only says which of the members are required."""
    return isinstance(branch, Mapping) and _DECLARES.isdisjoint(branch)


def _list(schema: Schema, key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []
