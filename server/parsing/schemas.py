"""JSON schemas of a function's arguments.

`closed`: JSON Schema lets an object have any other member unless it forbids them; a small model
goes on inventing some. OpenAI's strict mode and vLLM read schemas as closed, too.

`is_enforced`: which schemas a grammar enforces whole, whatever their values are. The keywords are
those of OpenAI's strict mode. Others may be enforced too, but some values of them cannot be: a
pattern that looks around, a format without a grammar.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import Any, TypeAlias

KINDS = ("string", "number", "integer", "boolean", "null", "object", "array")
"""JSON Schema's types."""

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


def kinds(schema: Any, root: Mapping[str, Any]) -> Set[str]:
    """The types that a schema allows, of KINDS; none where it does not say, or says it at length.

    References lead into `root`, the function's whole schema.
    """
    found, left = set[str](), _MOST_BRANCHES
    for branch in _alternatives(schema, root):
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
    """The rest of `left` steps after following one parameter. Raises ValueError below zero."""
    for branch in _alternatives(parameter, root):
        reference = branch.get("$ref")
        steps = reference.count("/") if isinstance(reference, str) else 0
        left -= 1 + steps + len(listed(branch, "enum"))
        if left < 0:
            raise ValueError(
                f"it takes more than {MAX_FOLLOWED_STEPS} steps to follow the references and "
                "alternatives of all parameters"
            )
    return left


def _alternatives(schema: Any, root: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
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

    An object whose members are declared in several places (`allOf`, or `properties` next to `anyOf`
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
        in_part = is_part or len(places) > 1 or not _OF_OBJECTS.isdisjoint(schema)
        waiting += [(one, in_part) for place in places for one in place]
        waiting += [(one, False) for one in _inner(schema)]


def _same_value(schema: Schema, root: Schema) -> Iterator[list[Any]]:
    """Schemas that a value conforms to as well: for each place, the alternatives."""
    if isinstance(schema.get("$ref"), str):
        yield [target(schema["$ref"], root)]
    for key in _BRANCHES:
        if branches := listed(schema, key):
            yield from [[one] for one in branches] if key == "allOf" else [branches]


def _inner(schema: Schema) -> Iterator[Any]:
    """The schemas of members and items."""
    for key in _MEMBERS:
        if isinstance(members := schema.get(key), Mapping):
            yield from members.values()
    for key in _VALUES:
        yield schema.get(key)
    for key in ("items", "prefixItems"):
        yield from listed(schema, key)


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
    branches = [one for key in _BRANCHES for one in listed(schema, key)]
    if not _SAYS_OTHERWISE.isdisjoint(schema) or not all(map(_declares_nothing, branches)):
        return schema
    required = [name for name in listed(schema, "required") if isinstance(name, str)]
    undeclared: dict[str, Schema] = {
        name: {} for name in required if name not in schema["properties"]
    }
    if undeclared and "patternProperties" in schema:
        return schema
    properties = {**schema["properties"], **undeclared}
    return {**schema, "properties": properties, "additionalProperties": False}


def _declares_nothing(branch: object) -> bool:
    """Whether a schema declares no members, such as one with only `required`."""
    return isinstance(branch, Mapping) and _DECLARES.isdisjoint(branch)


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
