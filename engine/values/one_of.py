"""`oneOf` as `anyOf`, where no value conforms to two of its branches.

Grammars have no form for "exactly one". Most generators write `oneOf` for branches that exclude
each other: by type, by a constant, by a property that one requires and the other forbids. Branches
that only require properties are made to exclude each other.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any, TypeAlias

Schema: TypeAlias = Mapping[str, Any]
Follow: TypeAlias = Callable[[str], Any]
"""The schema to which a `$ref` leads; true where it leads nowhere."""

MOST_BRANCHES = 64
MOST_SCHEMAS = 4000
"""That are looked at for one `oneOf`."""
MOST_DEPTH = 12

_KINDS = ("string", "number", "boolean", "null", "object", "array")
_SAYS_NOTHING = frozenset({"title", "description", "$comment", "examples", "default"})


def as_any_of(schema: Schema, follow: Follow) -> dict[str, Any]:
    """An equal schema without `oneOf`; the same one where that is not known to be possible."""
    branches = schema.get("oneOf")
    if not isinstance(branches, list) or not 0 < len(branches) <= MOST_BRANCHES:
        return dict(schema)
    rest = {key: value for key, value in schema.items() if key != "oneOf"}
    put = branches if _exclude(branches, rest, follow) else _apart(branches)
    if put is None:
        return dict(schema)
    if "anyOf" not in rest:
        return {**rest, "anyOf": put}
    others = rest.get("allOf", [])
    return (
        {**rest, "allOf": [*others, {"anyOf": put}]} if isinstance(others, list) else dict(schema)
    )


def _apart(branches: Sequence[Any]) -> list[Schema] | None:
    """Branches that require properties and nothing else: each forbids a property that another one
    requires, in every way to do so. None where that takes too many.
    """
    names = [_required_alone(branch) for branch in branches]
    put = list[Schema]()
    for at, mine in enumerate(names):
        others = names[:at] + names[at + 1 :]
        if mine is None or None in others:
            return None
        missing = [sorted(other - mine) for other in others if other is not None]
        if len(put) + math.prod(map(len, missing)) > MOST_BRANCHES:
            return None
        required = branches[at]["required"]
        for forbidden in sorted({frozenset(each) for each in product(*missing)}, key=sorted):
            never = dict.fromkeys(sorted(forbidden), False)
            put.append({"type": "object", "required": required, "properties": never})
    return put or None


def _required_alone(branch: Any) -> set[str] | None:
    if not isinstance(branch, Mapping) or not branch.keys() <= {"required", *_SAYS_NOTHING}:
        return None
    required = branch.get("required")
    is_known = isinstance(required, list) and all(isinstance(name, str) for name in required)
    return set(required) if is_known and required else None


def _exclude(branches: Sequence[Any], rest: Schema, follow: Follow) -> bool:
    """Whether no value is known to conform to two of them and to the rest of their schema."""
    prover = _Prover(follow)
    pairs = combinations(branches, 2)
    return all(prover.exclude([one, rest], [other, rest], 0) for one, other in pairs)


class _Prover:
    def __init__(self, follow: Follow) -> None:
        self._follow = follow
        self._left = MOST_SCHEMAS

    def exclude(self, one: Sequence[Any], other: Sequence[Any], depth: int) -> bool:
        """Whether no value conforms to all of some schemas and to all of others."""
        first, second = list(self._all(one)), list(self._all(other))
        if depth > MOST_DEPTH or self._left < 0:
            return False
        mine = [schema for schema in first if isinstance(schema, Mapping)]
        theirs = [schema for schema in second if isinstance(schema, Mapping)]
        return (
            any(schema is False for schema in (*first, *second))
            or self._values_exclude(mine, theirs)
            or self._alternatives(mine, theirs, depth)
            or self._alternatives(theirs, mine, depth)
            or self._objects(mine, theirs, depth)
        )

    def _values_exclude(self, mine: list[Schema], theirs: list[Schema]) -> bool:
        kinds = _kinds(mine) & _kinds(theirs)
        if not kinds or _differ(_values(mine), _values(theirs)):
            return True
        is_apart = _highest(mine) < _lowest(theirs) or _highest(theirs) < _lowest(mine)
        return kinds == {"number"} and is_apart

    def _alternatives(self, first: list[Schema], second: list[Schema], depth: int) -> bool:
        """Whether each alternative of one of the first schemas excludes the second ones."""
        for schema in first:
            for key in ("anyOf", "oneOf"):
                several = schema.get(key)
                if isinstance(several, list) and several:
                    rest = [{**one, key: None} if one is schema else one for one in first]
                    if all(self.exclude([each, *rest], second, depth + 1) for each in several):
                        return True
        return False

    def _objects(self, mine: list[Schema], theirs: list[Schema], depth: int) -> bool:
        if _kinds(mine) & _kinds(theirs) != {"object"}:
            return False
        ours, others = _required(mine), _required(theirs)
        if any(_forbids(theirs, name) for name in ours) or any(
            _forbids(mine, name) for name in others
        ):
            return True
        return any(
            self.exclude(_members(mine, name), _members(theirs, name), depth + 1)
            for name in sorted(ours & others)
        )

    def _all(self, schemas: Sequence[Any]) -> Iterator[Any]:
        """The schemas, and those that apply to the same value by `$ref` and `allOf`."""
        waiting, seen = list(schemas), set[int]()
        while waiting and self._left >= 0:
            schema = waiting.pop()
            if id(schema) in seen and isinstance(schema, Mapping):
                continue
            seen.add(id(schema))
            self._left -= 1 + _weight(schema)
            yield schema
            if isinstance(schema, Mapping):
                if isinstance(schema.get("$ref"), str):
                    waiting.append(self._follow(schema["$ref"]))
                if isinstance(schema.get("allOf"), list):
                    waiting += schema["allOf"]


def _weight(schema: Any) -> int:
    """What a schema with long lists costs besides itself."""
    if not isinstance(schema, Mapping):
        return 0
    lists = (schema.get(key) for key in ("enum", "required"))
    return sum(len(one) for one in lists if isinstance(one, list)) // 16


def _kinds(schemas: Sequence[Schema]) -> set[str]:
    """Types of the values that conform to all; integers are numbers."""
    kinds = set(_KINDS)
    for schema in schemas:
        stated = schema.get("type")
        types = stated if isinstance(stated, list) else [stated]
        if stated is not None and all(isinstance(one, str) for one in types):
            kinds &= {"number" if one == "integer" else one for one in types}
    values = _values(schemas)
    return kinds if values is None else kinds & {_kind(json.loads(value)) for value in values}


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    names = {str: "string", int: "number", float: "number", dict: "object", list: "array"}
    return names.get(type(value), "null")


def _values(schemas: Sequence[Schema]) -> set[str] | None:
    """The values that constants leave, as text; None where there are none."""
    found: set[str] | None = None
    for schema in schemas:
        listed = [[schema["const"]]] if "const" in schema else []
        if isinstance(schema.get("enum"), list):
            listed.append(schema["enum"])
        for values in listed:
            texts = {_text(value) for value in values}
            found = texts if found is None else found & texts
    return found


def _text(value: Any) -> str:
    """Equal for equal values of JSON, for which 1 and 1.0 are."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True)


def _differ(one: set[str] | None, other: set[str] | None) -> bool:
    """Whether two sets of values have none in common. Numbers within lists and objects may be equal
    in other digits, so such values never differ.
    """
    if one is None or other is None or any(text[0] in "[{" for text in one | other):
        return False
    return one.isdisjoint(other)


def _bounds(schemas: Sequence[Schema], key: str) -> list[float]:
    values = [schema.get(key) for schema in schemas]
    return [one for one in values if isinstance(one, int | float) and not isinstance(one, bool)]


def _highest(schemas: Sequence[Schema]) -> float:
    return min(_bounds(schemas, "maximum"), default=float("inf"))


def _lowest(schemas: Sequence[Schema]) -> float:
    return max(_bounds(schemas, "minimum"), default=float("-inf"))


def _required(schemas: Sequence[Schema]) -> set[str]:
    listed = [schema.get("required") for schema in schemas]
    return {name for names in listed if isinstance(names, list) for name in names if _is_name(name)}


def _is_name(value: Any) -> bool:
    return isinstance(value, str)


def _members(schemas: Sequence[Schema], name: str) -> list[Any]:
    declared = [schema.get("properties") for schema in schemas]
    return [one[name] for one in declared if isinstance(one, Mapping) and name in one]


def _forbids(schemas: Sequence[Schema], name: str) -> bool:
    """Whether one of the schemas allows no property of this name."""
    for schema in schemas:
        declared = schema.get("properties", {})
        if not isinstance(declared, Mapping):
            continue
        is_closed = (
            schema.get("additionalProperties") is False and "patternProperties" not in schema
        )
        if declared.get(name, not is_closed) is False:
            return True
    return False
