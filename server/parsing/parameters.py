"""Which parameters a function has, and what their values may be: for grammars and for readers.

The parameters of a schema are those of all schemas that apply to the same object: of the schema
itself, of what a `$ref` leads to, of each in `allOf`; of `anyOf`, `oneOf`, `if` and
`dependentSchemas` in alternatives. What cannot be told exactly is told more loosely, so that no
call is lost: too many alternatives are one that has the parameters of all.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from server.parsing.json_schema import alternatives, applied, followed, listed

Schema: TypeAlias = Mapping[str, Any]

MOST_SHAPES = 12
"""Alternatives that a grammar distinguishes."""
MOST_DEPTH = 100
"""References and lists of schemas that lead from the function's schema to one that applies."""
MOST_WORK = 20_000
"""Names that are looked at in all schemas that apply. After that anything is allowed."""

MAX_REFERENCE_STEPS = 64
"""Names in the path of one `$ref`. Generated schemas have two or three."""
MAX_FOLLOWED_STEPS = 1 << 18
"""Steps to find the types of all parameters of a request's functions. Ordinary tools take a few
steps for each parameter."""

ANYTHING: Schema = {}


@dataclass(frozen=True, slots=True)
class Parameters:
    """The parameters of an object: schemas by name, the required ones in their order, schemas by a
    pattern of their name, and the schema of all others.

    `others` is False where others are forbidden, and None where nothing is said about them.
    """

    declared: Mapping[str, Any] = field(default_factory=dict)
    required: Sequence[str] = ()
    patterns: Mapping[str, Any] = field(default_factory=dict)
    others: Any = None
    is_open: bool = False
    """Whether part of what is said is unknown, so that there may be others."""
    has_members: bool = False
    """Whether any schema says which members there are."""
    is_exact: bool = True
    """Whether an object that has these parameters conforms to the schema."""

    def of(self, key: str) -> Any:
        """The schema of a parameter; None for one that is not declared in any way."""
        if key in self.declared:
            return self.declared[key]
        fitting = [schema for pattern, schema in self.patterns.items() if _may_match(pattern, key)]
        if fitting:
            return _any(fitting) if len(fitting) > 1 else fitting[0]
        return self.others if isinstance(self.others, Mapping) and self.others else None

    @property
    def undeclared(self) -> Any:
        """The schema of parameters that neither a name nor a pattern declares; False for none.

        An object that declares parameters has no others, unless it says so: small models go on
        inventing some.
        """
        if self.others is not None:
            return self.others
        return ANYTHING if self.is_open or not self.has_members else False


UNKNOWN = Parameters(is_open=True, is_exact=False)
"""What is said at too great length: there may be any."""

_NOT_EXACT = frozenset(
    {"if", "dependentSchemas", "dependencies", "dependentRequired", "unevaluatedProperties"}
    | {"not", "propertyNames", "minProperties", "maxProperties"}
)
"""Keywords of objects of which at most a part is told."""


def shapes(schema: Schema, root: Schema | None = None) -> list[Parameters]:
    """The alternatives for a function's parameters, or an object's members, of which a value has
    one. References lead into `root`, or else into the schema.
    """
    try:
        return list(map(_with_required, _Shapes(root or schema).of(schema, 0)))
    except _TooMuch:
        return [UNKNOWN]


def parameters(schema: Schema, root: Schema | None = None) -> Parameters:
    """All parameters that a function may be called with, or all members of an object. References
    lead into `root`, or else into the schema.
    """
    try:
        reading = _Shapes(root or schema)
        return _with_required(reading.union(reading.of(schema, 0)))
    except _TooMuch:
        return UNKNOWN


def _with_required(shape: Parameters) -> Parameters:
    """Names that are required count as declared."""
    undeclared = [name for name in shape.required if name not in shape.declared]
    schemas = {name: _or_anything(shape.of(name)) for name in undeclared}
    return replace(shape, declared={**shape.declared, **schemas})


def _or_anything(schema: Any) -> Any:
    return ANYTHING if schema is None else schema


class _TooMuch(Exception):
    """A schema says more of its parameters than is looked at."""


class _Shapes:
    """The shapes of schemas, each found once."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._left = MOST_WORK
        self._known: dict[int, list[Parameters]] = {}
        self._kept: list[Schema] = []  # another schema would get the identity of one that is gone

    def of(self, schema: Any, depth: int) -> list[Parameters]:
        """Raises _TooMuch."""
        if not isinstance(schema, Mapping):
            return [Parameters()]
        if depth > MOST_DEPTH:
            return [UNKNOWN]
        if id(schema) in self._known:
            return self._known[id(schema)]
        self._kept.append(schema)
        self._known[id(schema)] = [Parameters()]  # where it refers to itself
        own = _own(schema)
        self._work(len(own.declared) + len(own.required))
        found = [own]
        for place in _places(schema, self._root):
            choices = [shape for one in place for shape in self.of(one, depth + 1)]
            if len(choices) * len(found) > MOST_SHAPES:
                choices, found = [self.union(choices)], [self.union(found)]
            found = [self._both(one, other) for one in found for other in choices]
        self._known[id(schema)] = found
        return found

    def _both(self, one: Parameters, other: Parameters) -> Parameters:
        self._work(1)
        if _NOTHING in (one, other):
            return other if one == _NOTHING else one
        n_names = len(one.declared) + len(other.declared)
        self._work(n_names * (1 + len(one.patterns) + len(other.patterns)))
        return _both(one, other)

    def union(self, several: Sequence[Parameters]) -> Parameters:
        """One that has the parameters of all. Raises _TooMuch."""
        names = {name for one in several for name in one.declared}
        self._work(len(several) * len(names) + sum(len(one.patterns) for one in several))
        return _union(several)

    def _work(self, n_names: int) -> None:
        self._left -= 1 + n_names
        if self._left < 0:
            raise _TooMuch


_NOTHING = Parameters()


def _places(schema: Schema, root: Schema) -> Iterator[Sequence[Any]]:
    """Schemas that apply to the same object: for each place, the alternatives."""
    if isinstance(schema.get("$ref"), str):
        yield [followed(schema["$ref"], root)]
    yield from alternatives(schema)
    if isinstance(schema.get("if"), Mapping) and ("then" in schema or "else" in schema):
        condition = schema["if"]
        then = {"allOf": [condition, schema.get("then", ANYTHING)]}
        yield [then, schema.get("else", ANYTHING)]
    for key in ("dependentSchemas", "dependencies"):
        if isinstance(dependent := schema.get(key), Mapping):
            for one in dependent.values():
                if isinstance(one, Mapping):
                    yield [ANYTHING, one]


def _own(schema: Schema) -> Parameters:
    """What a schema says itself."""
    declared, patterns = schema.get("properties"), schema.get("patternProperties")
    others = schema.get("additionalProperties", schema.get("unevaluatedProperties"))
    dependent = schema.get("dependentRequired")
    later = [
        name
        for names in (dependent.values() if isinstance(dependent, Mapping) else ())
        if isinstance(names, list)
        for name in names
        if isinstance(name, str)
    ]
    own = dict(declared) if isinstance(declared, Mapping) else {}
    for name in dict.fromkeys(later):
        own.setdefault(name, ANYTHING)
    return Parameters(
        own,
        [name for name in dict.fromkeys(map(_name, listed(schema, "required"))) if name],
        patterns if isinstance(patterns, Mapping) else {},
        ANYTHING if others is True else others if isinstance(others, Mapping | bool) else None,
        has_members=not {"properties", "patternProperties"}.isdisjoint(schema) or bool(own),
        is_exact=_NOT_EXACT.isdisjoint(schema),
    )


def _name(name: Any) -> str:
    return name if isinstance(name, str) else ""


def _both(one: Parameters, other: Parameters) -> Parameters:
    """The parameters of an object to which both apply.

    A parameter that one of them declares stays where the other forbids all but its own: many
    generators write that, and mean no contradiction.
    """
    names = dict.fromkeys([*one.declared, *other.declared])
    declared = {}
    for name in names:
        schemas = [part.of(name) for part in (one, other) if part.of(name) is not None]
        declared[name] = schemas[0] if len(schemas) == 1 else _all(schemas)
    others = [part.others for part in (one, other) if part.others is not None]
    is_contradiction = any(
        part.others is False and part.of(name) is None for part in (one, other) for name in names
    )
    return Parameters(
        declared,
        [*dict.fromkeys([*one.required, *other.required])],
        {**one.patterns, **other.patterns},
        (False if False in others else _all(others)) if others else None,
        one.is_open or other.is_open,
        one.has_members or other.has_members,
        one.is_exact and other.is_exact and not is_contradiction,
    )


def _union(several: Sequence[Parameters]) -> Parameters:
    """The parameters that an object of any of these may have."""
    if len(several) == 1:
        return several[0]
    names = dict.fromkeys(name for one in several for name in one.declared)
    declared = {}
    for name in names:
        schemas = [schema for one in several if (schema := one.of(name)) is not None]
        declared[name] = _any(schemas)
    required = set.intersection(*(set(one.required) for one in several))
    others = [one.undeclared for one in several if one.undeclared is not False]
    said = [one.others for one in several if one.others is not None]
    return Parameters(
        declared,
        [name for name in several[0].required if name in required],
        {pattern: one for part in several for pattern, one in part.patterns.items()},
        (_any(others) if others else False) if said else None,
        any(one.is_open for one in several),
        any(one.has_members for one in several),
        is_exact=False,
    )


def _all(schemas: Sequence[Any]) -> Any:
    different = _different(schemas)
    return different[0] if len(different) == 1 else {"allOf": different}


def _any(schemas: Sequence[Any]) -> Any:
    different = _different(schemas)
    return different[0] if len(different) == 1 else {"anyOf": different}


def _different(schemas: Sequence[Any]) -> list[Any]:
    return list({id(schema): schema for schema in schemas}.values())


_SIMPLE = re.compile(
    r"\^?(?:(?:[A-Za-z0-9_ :/@-]|\\[dws.$*+?()\[\]{}|/-]|\[\^?[A-Za-z0-9_. :/@-]+\]|\.)"
    r"(?:[?*+]|\{\d{1,3}(?:,\d{0,3})?\})?)*\$?"
)
"""Patterns that Python reads as ECMA-262 does, and in time that does not explode."""
_REPEATED = re.compile(r"[*+}]")
_MOST_REPEATED = 2


def _may_match(pattern: str, key: str) -> bool:
    """Whether a name may match a pattern. It may if the pattern is not simple."""
    if not _SIMPLE.fullmatch(pattern) or len(_REPEATED.findall(pattern)) > _MOST_REPEATED:
        return True
    return re.search(pattern, key, re.ASCII) is not None


def check_work(functions: Iterable[Mapping[str, Any]]) -> None:
    """Raise ValueError where the parameters of all functions together take too many steps to
    follow. Each of `functions` is the schema of one function's parameters.

    A few kilobytes of schemas that refer to one another can take minutes of work otherwise.
    """
    left = MAX_FOLLOWED_STEPS
    for root in functions:
        _check_references(root)
        found = parameters(root)
        for parameter in (*found.declared.values(), *found.patterns.values(), found.others):
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
    for branch in applied(parameter, root):
        reference = branch.get("$ref")
        steps = reference.count("/") if isinstance(reference, str) else 0
        left -= 1 + steps + len(listed(branch, "enum"))
        if left < 0:
            raise ValueError(
                f"it takes more than {MAX_FOLLOWED_STEPS} steps to follow the references and "
                "alternatives of all parameters"
            )
    return left
