"""Values that models write as plain text, converted to JSON by their schema."""

import ast
import json
from collections.abc import Mapping, Sequence, Set
from typing import Any, NoReturn

KINDS = ("string", "number", "integer", "boolean", "null", "object", "array")
"""JSON Schema's types."""

_MOST_LITERAL = 2000  # characters that are tried as a Python literal: the attempt is slow
_MOST_BRANCHES = 1000  # and values of enums: they are gone through for each value that is written
_MOST_REFERENCES = 16  # one after the other: they may lead in a circle
_KIND_OF: Mapping[type, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
    dict: "object",
    list: "array",
}
_IMPLIED = {"object": "properties", "array": "items"}
_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}


def kinds(schema: Any, root: Mapping[str, Any]) -> Set[str]:
    """The types that a schema allows, of KINDS; none where it does not say, or says it at length.

    References lead into `root`, the function's whole schema.
    """
    found: set[str] = set()
    waiting, seen, left = [schema], set[int](), _MOST_BRANCHES
    while waiting:
        branch = resolved(waiting.pop(), root)
        if id(branch) in seen:
            continue
        seen.add(id(branch))
        left -= 1 + len(_items(branch, "enum"))
        if left < 0:
            return set()
        found |= _stated_kinds(branch)
        for choice in ("anyOf", "oneOf", "allOf"):
            waiting += _items(branch, choice)
    return found


def resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema itself, or the one that it refers to; an empty one where there is none."""
    for _ in range(_MOST_REFERENCES):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str):
            break
        schema = root
        for step in reference.removeprefix("#").split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            schema = schema.get(key) if isinstance(schema, Mapping) else None
    return schema if isinstance(schema, Mapping) else {}


def kind(value: Any) -> str:
    """The most special of KINDS that a JSON value is of."""
    return _KIND_OF[type(value)]


def as_json(text: str, allowed: Set[str]) -> str:
    """The text as JSON of one of the allowed kinds, or of any if none is.

    Text that is nothing else is a string. JSON stays as it is written; Python's words and literals,
    which models write too, become JSON.
    """
    source = _as_written(text.strip())
    if source is None:
        return json.dumps(text, ensure_ascii=False)
    value = json.loads(source)
    if "integer" in allowed and isinstance(value, float) and value.is_integer():
        return str(int(value))
    if _is_of(value, allowed - {"string"}):
        return source
    return json.dumps(text, ensure_ascii=False) if "string" in allowed else source


def _stated_kinds(schema: Mapping[str, Any]) -> Set[str]:
    stated = schema.get("type")
    types = stated if isinstance(stated, list) else [stated]
    values = [*_items(schema, "enum"), *([schema["const"]] if "const" in schema else [])]
    found = {name for name in KINDS if name in types} | set(map(kind, values))
    return found or {name for name, key in _IMPLIED.items() if key in schema}


def _items(schema: Mapping[str, Any], key: str) -> Sequence[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def _is_of(value: Any, allowed: Set[str]) -> bool:
    name = kind(value)
    return not allowed or name in allowed or (name == "integer" and "number" in allowed)


def _as_written(text: str) -> str | None:
    """The text as JSON, whatever it says; None if it says nothing in JSON or in Python."""
    source = _WORDS.get(text.lower(), text)
    try:
        json.loads(source, parse_constant=_refuse)
        return source
    except (ValueError, RecursionError):
        pass
    if len(text) > _MOST_LITERAL:
        return None
    try:
        return json.dumps(ast.literal_eval(text), allow_nan=False)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None


def _refuse(word: str) -> NoReturn:
    raise ValueError(word)  # NaN and Infinity, which JSON does not have
