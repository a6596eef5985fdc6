"""`not` as a schema without it, where there is one.

Grammars have no form for "all but this". What does not conform to a schema breaks one of its
keywords: another type, a missing property, a number beyond a bound.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

Schema: TypeAlias = Mapping[str, Any]
Follow: TypeAlias = Callable[[str], Any]
"""The schema to which a `$ref` leads; true where it leads nowhere."""

MOST_SCHEMAS = 64
"""That are looked at for one `not`."""

_NOTHING: Schema = {"enum": []}
_KINDS = ("string", "number", "boolean", "null", "object", "array")
_SAYS_NOTHING = frozenset({"title", "description", "$comment", "examples", "default"})
_BEYOND = {
    "minimum": ("number", "exclusiveMaximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
}
"""The type of the values that break a bound, the keyword that they keep, and how far its bound is
from the other."""


class _NoForm(Exception):
    pass


def without_not(schema: dict[str, Any], follow: Follow) -> dict[str, Any]:
    """An equal schema without `not`; the same one where none is known."""
    others = schema.get("allOf", [])
    if "not" not in schema or not isinstance(others, list):
        return schema
    try:
        put = _Negation(follow).of(schema["not"])
    except _NoForm:
        return schema
    rest = {key: value for key, value in schema.items() if key != "not"}
    return {**rest, "allOf": [*others, put]}


class _Negation:
    def __init__(self, follow: Follow) -> None:
        self._follow = follow
        self._left = MOST_SCHEMAS

    def of(self, schema: Any) -> Any:
        """Raises _NoForm."""
        self._left -= 1
        if self._left < 0 or not isinstance(schema, Mapping | bool):
            raise _NoForm
        if isinstance(schema, bool):
            return {} if schema is False else _NOTHING
        said = {key: value for key, value in schema.items() if key not in _SAYS_NOTHING}
        return _any_of(
            found for key, value in said.items() for found in self._breaks(key, value, said)
        )

    def _breaks(self, key: str, value: Any, schema: Schema) -> Iterator[Any]:
        """Alternatives of values that break one keyword."""
        match key, value:
            case "not", _:
                yield value
            case "$ref", str():
                yield self.of(self._follow(value))
            case "allOf", list():
                yield from map(self.of, value)
            case "anyOf", list():
                yield {"allOf": [self.of(one) for one in value]}
            case "required", list():
                yield from ({"type": "object", "properties": {_name(one): False}} for one in value)
            case "type", str() | list():
                yield _other_types([value] if isinstance(value, str) else value)
            case "properties", Mapping() if schema.keys().isdisjoint(_OTHER_MEMBERS):
                for name, one in value.items():
                    never = self.of(one)
                    yield {"type": "object", "required": [name], "properties": {name: never}}
            case _, int() | float() if key in _BEYOND and not isinstance(value, bool):
                kind, kept, step = _BEYOND[key]
                if kept.startswith("max") and kind != "number" and value + step < 0:
                    return
                yield {"type": kind, kept: value + step}
            case _:
                raise _NoForm


_OTHER_MEMBERS = frozenset({"patternProperties", "additionalProperties", "unevaluatedProperties"})


def _any_of(alternatives: Iterator[Any]) -> Any:
    found = list(alternatives)
    return found[0] if len(found) == 1 else {"anyOf": found} if found else _NOTHING


def _other_types(types: list[Any]) -> Schema:
    if "integer" in types and "number" not in types:
        raise _NoForm
    return {"type": [kind for kind in _KINDS if kind not in types]} if types else {}


def _name(value: Any) -> str:
    if not isinstance(value, str):
        raise _NoForm
    return value
