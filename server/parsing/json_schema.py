"""JSON schemas of a function's arguments.

`closed`: JSON Schema lets an object have any other member unless it forbids them; a small model
goes on inventing some. OpenAI's strict mode and vLLM read schemas as closed, too.

`is_enforced`: which schemas a grammar enforces whole, whatever their values are. The keywords are
those of OpenAI's strict mode. Others may be enforced too, but some values of them cannot be: a
pattern that looks around, a format without a grammar.
"""

from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any, TypeAlias

from engine.values.schemas import LeadsNowhere, target

KINDS = ("string", "number", "integer", "boolean", "null", "object", "array")
"""JSON Schema's types."""

_MOST_BRANCHES = 1000  # and values of enums: they are gone through for each value that is written

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

    A value conforms to all that applies to it: types are those that each of the schema, its
    reference, and the alternatives allow. References lead into `root`, the function's whole schema.
    """
    try:
        return _Kinds(root).of(schema, 0) or set()
    except _TooLong:
        return set()


class _TooLong(Exception):
    """A schema says its types at too great length."""


_MOST_KIND_DEPTH = 250


class _Kinds:
    """The types of schemas, each found once."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._left = _MOST_BRANCHES
        self._known: dict[int, Set[str] | None] = {}
        self._kept: list[Schema] = []  # another schema would get the identity of one that is gone

    def of(self, schema: Any, depth: int) -> Set[str] | None:
        """None: any type. Raises _TooLong."""
        if schema is False:
            return set()
        if not isinstance(schema, Mapping) or depth > _MOST_KIND_DEPTH:
            return None
        if id(schema) in self._known:
            return self._known[id(schema)]
        self._kept.append(schema)
        self._known[id(schema)] = None  # where it refers to itself, that says nothing
        self._left -= 1 + len(listed(schema, "enum"))
        if self._left < 0:
            raise _TooLong
        found: Set[str] | None = _stated_kinds(schema) or None
        for place in _same_value(schema, self._root):
            each = [self.of(one, depth + 1) for one in place]
            if None not in each:
                found = _common(found, set().union(*(one for one in each if one)))
        self._known[id(schema)] = found
        return found


def _common(one: Set[str] | None, other: Set[str]) -> Set[str]:
    """The types that both allow; integers are numbers."""
    if one is None:
        return other
    common = one & other
    if "integer" in (one | other) - common and "number" in (one | other) - common:
        common |= {"integer"}
    return common


def common_types(one: Any, other: Any) -> list[str]:
    """The types that two values of `type` both allow."""
    first, second = (
        {name for name in KINDS if name in (types if isinstance(types, list) else [types])}
        for types in (one, other)
    )
    return [name for name in KINDS if name in _common(first, second)]


def followed(reference: str, root: Mapping[str, Any]) -> Any:
    """The schema to which a `$ref` leads, which may be a reference itself. An empty schema, which
    allows anything, where the `$ref` leads nowhere.
    """
    try:
        return target(reference, root)
    except LeadsNowhere:
        return {}


def applied(schema: Any, root: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
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
            waiting.append(followed(branch["$ref"], root))
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
        yield [followed(schema["$ref"], root)]
    yield from alternatives(schema)


def alternatives(schema: Schema) -> Iterator[list[Any]]:
    """For each of `allOf`, for `anyOf` and for `oneOf`: the schemas of which a value conforms to
    one."""
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
