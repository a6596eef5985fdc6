"""Rewrites or refuses the parts of JSON Schema that llguidance would misread.

Schemas are read as Draft 2020-12, with the lists in `items` of the drafts before it.
"""

import json
import math
from collections.abc import Iterable, Iterator
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Any, TypeAlias, TypeGuard

from engine.grammar.constants import MAX_INTEGER, exact_integer
from engine.grammar.patterns import UNSPELLABLE, rust_pattern
from engine.values.formats import FORMATS
from engine.values.schemas import plain, refuse, target

Schema: TypeAlias = dict[str, Any]

READ_TOO_WIDELY = frozenset({"date", "time", "date-time", "duration", "hostname", "email"})
"""Formats of which llguidance allows too much: 29 February in any year, any minute's leap second,
durations that no language holds, labels that claim to be Punycode, and mailboxes of any length.
Patterns replace them: no minute has a leap second, years begin with 0001, and no label has hyphens
in its third and fourth place. That of e-mail does not where the schema has another: both together
take llguidance too long."""

MAX_NAME_PATTERNS = 32
"""Of one schema: llguidance compares each with each."""

MAX_LARGE_CONSTANTS = 64
"""Integers beyond 2^53 in one enum: for each a divisor is looked for, which takes milliseconds."""

_LARGEST_SAFE = 2**53
_LARGEST_BOUND = 2**63
_EXACT_DIGITS = 15
_TO_FLOOR = Context(prec=_EXACT_DIGITS, rounding=ROUND_FLOOR)
_TO_CEILING = Context(prec=_EXACT_DIGITS, rounding=ROUND_CEILING)

_ONE = ("items", "additionalProperties", "additionalItems")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties")
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")


def faithful(text: str) -> Schema:
    """The schema that `text` holds, so put that llguidance allows nothing that it forbids.

    Raises ValueError, in words for a client, for what cannot be put so.
    """
    try:
        root = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError("the schema is nested too deeply") from error
    if root is True:
        return {}
    if not isinstance(root, dict):
        raise ValueError("a schema is an object, or true; false allows nothing")
    root.pop("x-guidance", None)  # llguidance's own settings are not a client's to choose
    root.pop("$schema", None)
    root = plain(root, root, refuse)
    for schema in list(_reached(root)):  # which adds schemas that need no rewriting
        _rewrite(schema)
    return root


def _reached(root: Schema) -> Iterator[Schema]:
    """Every schema that applies, each once: the root, its subschemas and the targets of its
    references.
    """
    waiting: list[object] = [root]
    seen: set[int] = set()
    while waiting:
        schema = waiting.pop()
        if not isinstance(schema, dict) or id(schema) in seen:
            continue
        seen.add(id(schema))
        yield schema
        waiting += [schema.get(key) for key in _ONE]
        waiting += [
            one for key in _LISTS if isinstance(schema.get(key), list) for one in schema[key]
        ]
        for key in _MAPS:
            if isinstance(schema.get(key), dict):
                waiting += schema[key].values()
        if schema.get("$ref") is not None:
            waiting.append(_target(schema["$ref"], root))


def _target(reference: object, root: Schema) -> object:
    if not isinstance(reference, str):
        raise ValueError("a $ref must be a string")
    return target(reference, root)


def _rewrite(schema: Schema) -> None:
    _put_large_constants(schema)
    _refuse_unfaithful(schema)
    if not isinstance(schema.get("items"), list):
        schema.pop("additionalItems", None)  # has no meaning, and would have prefixItems ignored
    if _has_integers(schema):
        _close_intervals(schema)
    for key in (*_LOWER, *_UPPER):
        if _is_number(schema.get(key)) and not _is_largest_integer(key, schema):
            schema[key] = _spelled(_bound(key, schema))
    if isinstance(schema.get("pattern"), str):
        schema["pattern"] = rust_pattern(schema["pattern"])
    if isinstance(patterns := schema.get("patternProperties"), dict):
        if len(patterns) > MAX_NAME_PATTERNS:
            raise ValueError(f"patternProperties: {MAX_NAME_PATTERNS} patterns are the most")
        schema["patternProperties"] = {rust_pattern(name): one for name, one in patterns.items()}
    others = schema.get("allOf", [])
    format = schema.get("format")
    is_costly = format == "email" and "pattern" in schema
    if format in tuple(READ_TOO_WIDELY) and not is_costly and isinstance(others, list):
        schema["allOf"] = [*others, FORMATS[schema.pop("format")]]


def _put_large_constants(schema: Schema) -> None:
    """Put constants that llguidance would write as another number, as far as there is a form."""
    others = schema.get("allOf", [])
    for key in ("const", "enum"):
        values = [schema[key]] if key == "const" and key in schema else schema.get(key)
        if not isinstance(values, list) or not isinstance(others, list):
            continue
        large = [value for value in values if type(value) is int and not _is_exact(value)]
        put = [exact_integer(value) for value in large[:MAX_LARGE_CONSTANTS]]
        if not put or None in put or len(large) > MAX_LARGE_CONSTANTS:
            continue
        rest = [value for value in values if type(value) is not int or _is_exact(value)]
        del schema[key]
        others = [*others, {"anyOf": [*put, *([{"enum": rest}] if rest else [])]}]
        schema["allOf"] = others


def _refuse_unfaithful(schema: Schema) -> None:
    if isinstance(schema.get("items"), list) and "prefixItems" in schema:
        raise ValueError("prefixItems together with a list of items is not supported")
    fewest, required = schema.get("minProperties"), schema.get("required")
    named = len(set(map(str, required))) if isinstance(required, list) else 0
    if _is_number(fewest) and fewest > max(1, named):
        # llguidance counts a name as often as it is written
        raise ValueError("minProperties above 1 is only supported up to the number of `required`")
    names = [*_named(schema.get("properties")), *_named(required)]
    for value in (schema.get("const"), schema.get("enum"), names):
        _refuse_unspeakable(value)


def _named(names: object) -> Iterable[object]:
    return names if isinstance(names, dict | list) else ()


def _refuse_unspeakable(value: object) -> None:
    """Numbers are compared as 64-bit floats; control characters would be dropped, or escape a
    pattern for names."""
    waiting = [value]
    while waiting:
        match waiting.pop():
            case dict() as members:
                waiting += [*members, *members.values()]
            case list() as items:
                waiting += items
            case str() as text if UNSPELLABLE.search(text):
                raise ValueError("control characters are not supported in names and values")
            case int() | float() as number if not _is_exact(number):
                raise ValueError(f"the number {str(number)[:40]} is not a 64-bit float")


def _is_exact(number: float) -> bool:
    """Whether llguidance writes a constant as this number. It writes integers of 64 bits in full,
    and the shortest decimal number that is the same float of all others, of whose digits it
    misreads some beyond the fifteenth.
    """
    nearest = _inward(number, math.inf)
    if nearest != number:
        return False
    shortest = Decimal(repr(float(nearest)))
    is_short = len(shortest.normalize().as_tuple().digits) <= _EXACT_DIGITS
    is_integer = number == math.floor(number) and -MAX_INTEGER <= number <= MAX_INTEGER
    return is_integer or (
        is_short and shortest == Decimal(number if isinstance(number, int) else repr(number))
    )


def _bound(key: str, schema: Schema) -> float:
    """A bound that llguidance keeps to. It misreads digits of fractions beyond the fifteenth: such
    a bound moves inward to as many. From 2^53 on, its numbers are rounded at exclusive bounds and,
    where they are no integers, at all: the bound moves inward, past the rounding.
    """
    stated, is_upper, is_integer = schema[key], key in _UPPER, _has_integers(schema)
    if key == "minimum" and is_integer and stated == -MAX_INTEGER - 1:
        stated += 1  # the smallest integer itself has no form
    inward = -math.inf if is_upper else math.inf
    bound = _inward(stated, inward)
    if bound != math.floor(bound):
        short = _TO_FLOOR if is_upper else _TO_CEILING
        return float(short.create_decimal(repr(bound)))
    if abs(bound) < _LARGEST_SAFE:
        return bound
    if abs(bound) > _LARGEST_BOUND:
        raise ValueError(f"{key} is not supported beyond 64-bit integers")
    if key.startswith("exclusive") and bound == stated:
        bound = math.nextafter(bound, inward)
    while not is_integer and _is_outside(bound, stated, is_upper=is_upper):
        bound = math.nextafter(bound, inward)
    return bound


def _spelled(number: float) -> float:
    """The same number as llguidance reads it: it misreads some digits of large floats."""
    is_whole = isinstance(number, float) and number.is_integer() and abs(number) <= MAX_INTEGER
    return int(number) if is_whole else number


def _is_outside(bound: float, stated: float, *, is_upper: bool) -> bool:
    """Whether a bound's shortest decimal number is beyond the one that a schema states."""
    shortest = Decimal(repr(float(bound)))
    return shortest > stated if is_upper else shortest < stated


def _is_largest_integer(key: str, schema: Schema) -> bool:
    """Whether a bound is that of 64-bit integers, which llguidance keeps to though no float is
    equal to it.
    """
    return key == "maximum" and schema[key] == MAX_INTEGER and _has_integers(schema)


def _has_integers(schema: Schema) -> bool:
    """Whether all numbers that the schema allows are integers."""
    types = schema.get("type")
    listed = types if isinstance(types, list) else [types]
    return "integer" in listed and "number" not in listed


def _close_intervals(schema: Schema) -> None:
    """Put large exclusive bounds of integers as inclusive ones."""
    for inclusive, exclusive in (_LOWER, _UPPER):
        bound, other = schema.get(exclusive), schema.get(inclusive)
        if not _is_number(bound) or not _LARGEST_SAFE <= abs(bound) < math.inf:
            continue
        is_upper = exclusive in _UPPER
        closed: float = math.ceil(bound) - 1 if is_upper else math.floor(bound) + 1
        if _is_number(other):
            closed = min(closed, other) if is_upper else max(closed, other)
        schema[inclusive] = closed
        del schema[exclusive]


def _inward(bound: float, direction: float) -> float:
    """The 64-bit float next to a number, in the given direction unless it is one itself."""
    try:
        nearest = float(bound)
    except OverflowError:
        nearest = math.inf
    if not math.isfinite(nearest):
        raise ValueError("a number is beyond 64-bit floats")
    beyond = nearest > bound if direction < 0 else nearest < bound
    if nearest == bound:
        return bound
    return math.nextafter(nearest, direction) if beyond else nearest


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
