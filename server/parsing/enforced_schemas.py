"""Which schemas a grammar enforces whole, whatever their values are.

The keywords are those of OpenAI's strict mode. Others may be enforced too, but some values of them
cannot be: a pattern that looks around, a format without a grammar.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from server.parsing.typed_values import KINDS

_MAPS = ("properties", "$defs", "definitions")
_DEFINITIONS = ("$defs", "definitions")


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
    """Whether a grammar keeps to the keyword. The schemas in its value are looked at apart."""
    if keyword == "$ref":
        return isinstance(value, str) and _leads_to_a_definition(value, root)
    is_kept = _KEPT.get(keyword)
    return is_kept is not None and is_kept(value)


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


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int | bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _is_map(value: Any) -> bool:
    return isinstance(value, Mapping)


def _is_schema(value: Any) -> bool:
    return isinstance(value, bool | Mapping)


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value)


_KEPT: Mapping[str, Callable[[Any], bool]] = {
    "type": lambda value: all(
        kind in KINDS for kind in (value if isinstance(value, list) else [value])
    ),
    "enum": lambda value: _is_list(value) and all(map(_is_plain, value)),
    "const": _is_plain,
    "required": lambda value: (
        isinstance(value, list) and all(isinstance(one, str) for one in value)
    ),
    "additionalProperties": _is_schema,
    "items": _is_schema,
    "anyOf": _is_list,
    "prefixItems": _is_list,
    **dict.fromkeys(_MAPS, _is_map),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _is_number),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), _is_number),
    # Annotations, which ask for nothing.
    **dict.fromkeys(("title", "description", "$comment", "default", "examples"), lambda _: True),
}
"""Keywords that grammars keep to, and which of their values."""
