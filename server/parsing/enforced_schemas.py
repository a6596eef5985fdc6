"""Which schemas a grammar enforces whole, whatever their values are.

The keywords are those of OpenAI's strict mode. Others may be enforced too, but some values of them
cannot be: a pattern that looks around, a format without a grammar.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from server.parsing.typed_values import KINDS

_ANNOTATIONS = frozenset({"title", "description", "$comment", "default", "examples"})
_BOUNDS = frozenset(
    {
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "minLength",
        "maxLength",
        "minItems",
        "maxItems",
    }
)
_MAPS = ("properties", "$defs", "definitions")
_DEFINITIONS = ("$defs", "definitions")
_KEPT: Mapping[str, type | tuple[type, ...]] = {
    "properties": dict,
    "$defs": dict,
    "definitions": dict,
    "required": list,
    "additionalProperties": (bool, dict),
    "items": (bool, dict),
    "anyOf": list,
    "prefixItems": list,
}
_PLAIN = (str, int, bool, type(None))


def is_enforced(root: Mapping[str, Any]) -> bool:
    """Whether a grammar can hold a function's arguments to all that the schema says."""
    waiting: list[Any] = [root]
    while waiting:
        schema = waiting.pop()
        if schema is True:
            continue
        if not isinstance(schema, Mapping):
            return False
        for keyword, value in schema.items():
            if not _is_kept(keyword, value, root):
                return False
            waiting += _schemas(keyword, value)
    return True


def _is_kept(keyword: str, value: Any, root: Mapping[str, Any]) -> bool:
    """Whether a grammar keeps to the keyword, its schemas left out: they are looked at apart."""
    match keyword, value:
        case "type", str() | list():
            kinds = value if isinstance(value, list) else [value]
            return all(kind in KINDS for kind in kinds)
        case "enum", list():
            return bool(value) and all(isinstance(one, _PLAIN) for one in value)
        case "const", _:
            return isinstance(value, _PLAIN)
        case "$ref", str():
            return _leads_to_a_definition(value, root)
    if keyword in _BOUNDS:
        return isinstance(value, int | float)
    return keyword in _ANNOTATIONS or isinstance(value, _KEPT.get(keyword, ()))


def _leads_to_a_definition(reference: str, root: Mapping[str, Any]) -> bool:
    if reference == "#":
        return True
    start, _, path = reference.partition("/")
    place, _, name = path.partition("/")
    definitions = root.get(place) if place in _DEFINITIONS else None
    return start == "#" and isinstance(definitions, Mapping) and name in definitions


def _schemas(keyword: str, value: Any) -> Iterator[Any]:
    """The schemas that are this keyword's value."""
    if keyword in _MAPS:
        yield from value.values()
    elif keyword in {"anyOf", "prefixItems"}:
        yield from value
    elif keyword in {"items", "additionalProperties"} and isinstance(value, Mapping):
        yield value
