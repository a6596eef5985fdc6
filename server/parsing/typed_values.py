"""Values that models write as plain text, converted to JSON by their schema."""

import ast
import json
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any, NoReturn

KINDS = ("string", "number", "integer", "boolean", "null", "object", "array")
"""JSON Schema's types."""

_MOST_LITERAL = 2000  # characters that are tried as a Python literal: the attempt is slow
_MOST_BRANCHES = 1000  # and values of enums: they are gone through for each value that is written

MAX_REFERENCE_STEPS = 64
"""Names in the path of one `$ref`. Generated schemas have two or three."""
MAX_FOLLOWED_STEPS = 1 << 18
"""Steps to find the types of all parameters of a request's functions. Ordinary tools take a few
steps for each parameter."""

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
    found, left = set[str](), _MOST_BRANCHES
    for branch in _reached(schema, root):
        left -= 1 + len(listed(branch, "enum"))
        if left < 0:
            return set()
        if not isinstance(branch.get("$ref"), str):
            found |= _stated_kinds(branch)
    return found


def target(reference: str, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema to which a `$ref` leads, which may be a reference itself. An empty schema, which
    allows anything, where the `$ref` leads nowhere.
    """
    schema: Any = root
    for step in reference.removeprefix("#").split("/")[1:]:
        if not isinstance(schema, Mapping):
            return {}
        schema = schema.get(step.replace("~1", "/").replace("~0", "~"))
    return schema if isinstance(schema, Mapping) else {}


def check_work(functions: Iterable[Mapping[str, Any]]) -> None:
    """Raise ValueError where the parameters of all functions together take too many steps to
    follow. Each of `functions` is the schema of one function's parameters.

    A few kilobytes of schemas that refer to one another can take minutes of work otherwise.
    """
    left = MAX_FOLLOWED_STEPS
    for root in functions:
        _check_references(root)
        declared = root.get("properties")
        parameters = declared.values() if isinstance(declared, Mapping) else ()
        for parameter in (*parameters, root.get("additionalProperties")):
            left = _followed(parameter, root, left)


def _check_references(root: Mapping[str, Any]) -> None:
    waiting: list[Any] = [root]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Mapping):
            waiting += part.values()
            reference = part.get("$ref")
            if isinstance(reference, str) and reference.count("/") > MAX_REFERENCE_STEPS:
                raise ValueError(
                    f"the path of a $ref has more than {MAX_REFERENCE_STEPS} steps: "
                    f"{reference[:40]}..."
                )
        elif isinstance(part, list):
            waiting += part


def _followed(parameter: Any, root: Mapping[str, Any], left: int) -> int:
    """What is left of `left` steps after following one parameter. Raises ValueError for less than
    none."""
    for branch in _reached(parameter, root):
        reference = branch.get("$ref")
        steps = reference.count("/") if isinstance(reference, str) else 0
        left -= 1 + steps + len(listed(branch, "enum"))
        if left < 0:
            raise ValueError(
                f"it takes more than {MAX_FOLLOWED_STEPS} steps to follow the references and "
                "alternatives of all parameters"
            )
    return left


def _reached(schema: Any, root: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The schema, and those that a value conforms to, or may, where it conforms to that: each once,
    references and alternatives followed as they are consumed.
    """
    waiting, seen = [schema], set[int]()
    while waiting:
        branch = waiting.pop()
        if not isinstance(branch, Mapping) or id(branch) in seen:
            continue
        seen.add(id(branch))
        yield branch
        if isinstance(branch.get("$ref"), str):
            waiting.append(target(branch["$ref"], root))
        else:
            waiting += [one for key in ("anyOf", "oneOf", "allOf") for one in listed(branch, key)]


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
    values = [*listed(schema, "enum"), *([schema["const"]] if "const" in schema else [])]
    found = {name for name in KINDS if name in types} | set(map(kind, values))
    return found or {name for name, key in _IMPLIED.items() if key in schema}


def listed(schema: Mapping[str, Any], key: str) -> list[Any]:
    """The list that a schema has under a key; an empty one where it has none."""
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
