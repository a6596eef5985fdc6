"""Random schemas, every one of them valid Draft 2020-12; some use what is not supported."""

import random
from collections.abc import Callable
from typing import Any, TypeAlias

Schema: TypeAlias = dict[str, Any] | bool

NAMES = (
    "a",
    "b",
    "name",
    "größe",
    'quo"te',
    "back\\slash",
    "tab\t",
    "日本",
    "",
    "$ref",
    "x-y",
    "\x01",
)
WORDS = ("yes", "no", "", "grün", 'a "b"', "\\", "line\nbreak", "😀", "[]", "null")
PATTERNS = (
    "^[a-z]{1,4}$",
    "^[A-Z]{2}-[0-9]{2,3}$",
    r"^\d{1,5}$",
    r"^\w{0,6}$",
    r"^(foo|ba[rz])?$",
    '^[^"]{1,3}$',
    r"^[^\\,]{0,4}$",
    r"^\S \S$",
    "^.{2}$",
    r"^[\x20-\x7e]{0,5}$",
    "^[äöü]{1,2}$",
    r"^\u00e9|z$",
)
NAME_PATTERNS = ("^x_[a-c]$", "^[0-9]{1,2}$", '^[^"a-z]{1,2}$')
FORMATS = (
    *("date-time", "time", "date", "duration", "email"),
    *("hostname", "ipv4", "ipv6", "uuid", "uri"),
)
UNSUPPORTED: tuple[dict[str, Any], ...] = (
    {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
    {"not": {"const": "yes"}},
    {"if": {"type": "string"}, "then": {"maxLength": 3}, "else": {"type": "null"}},
    {"type": "array", "contains": {"type": "integer"}},
    {"type": "object", "propertyNames": {"maxLength": 3}},
    {"type": "object", "dependentRequired": {name: ["b"] for name in "acdef"}},
    {"type": "object", "minProperties": 3},
    {"type": "object", "unevaluatedProperties": False},
    {"$dynamicRef": "#node"},
    {"type": "string", "pattern": "^(?=a)"},
    {"type": "string", "format": "json-pointer"},
    {"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 2}]},
    {"const": 2**64 - 1},
    {"type": "object", "properties": {"\x01": True}, "patternProperties": {"^.$": False}},
)


class Generator:
    """Draws from one seed; schemas nest at most `depth` levels."""

    def __init__(self, seed: int, depth: int = 3) -> None:
        self._random = random.Random(seed)
        self._depth = depth

    def schema(self) -> Schema:
        """A whole schema, with definitions that it refers to, and to itself perhaps."""
        draw = self._random
        made = self._any(self._depth)
        if isinstance(made, bool):
            return made
        if draw.random() < 0.95:  # elsewhere references lead nowhere
            made["$defs"] = {"leaf": self._leaf(), "node": self._node()}
        if draw.random() < 0.1:
            made["$schema"] = "https://json-schema.org/draft/2020-12/schema"
        if draw.random() < 0.05:
            made["x-guidance"] = {"lenient": True, "item_separator": ";", "whitespace_pattern": "x"}
        return made

    def _any(self, depth: int) -> Schema:
        draw = self._random
        if draw.random() < 0.01:
            return dict(draw.choice(UNSUPPORTED))
        if draw.random() < 0.02:
            return draw.choice((True, True, False, {}))
        if depth == 0 or draw.random() < 0.3:
            return self._leaf()
        kinds: tuple[Callable[[int], Schema], ...] = (
            self._object,
            self._object,
            self._array,
            self._array,
            self._union,
            self._all_of,
            self._reference,
        )
        return draw.choice(kinds)(depth - 1)

    def _leaf(self) -> dict[str, Any]:
        kinds = (
            self._string,
            self._string,
            self._number,
            self._choice,
            lambda: {"type": "boolean"},
            lambda: {"type": ["null", "integer"], "minimum": -9, "exclusiveMaximum": 9},
        )
        made = self._random.choice(kinds)()
        if self._random.random() < 0.1:
            made |= {"title": "Leaf", "description": "anything", "default": 1, "x-unknown": [1]}
        return made

    def _string(self) -> dict[str, Any]:
        draw = self._random
        made: dict[str, Any] = {"type": "string"}
        match draw.randrange(4):
            case 0:
                made["pattern"] = draw.choice(PATTERNS)
            case 1:
                made["format"] = draw.choice(FORMATS)
            case 2:
                made["minLength"] = draw.randrange(4)
                made["maxLength"] = made["minLength"] + draw.randrange(5)
            case 3:
                made["maxLength"] = draw.randrange(1, 30)
        return made

    def _number(self) -> dict[str, Any]:
        draw = self._random
        whole = draw.random() < 0.6
        made: dict[str, Any] = {"type": "integer" if whole else "number"}
        low = draw.choice((-1000, -7, -1, 0, 1, 3, 10**6, -(2**53), 0.5, -2.25))
        if draw.random() < 0.7:
            made[draw.choice(("minimum", "exclusiveMinimum"))] = low
        if draw.random() < 0.7:
            width = draw.choice((2, 10, 12345, 2**62))
            made[draw.choice(("maximum", "exclusiveMaximum"))] = low + width
        if draw.random() < 0.2:
            made["multipleOf"] = draw.choice((2, 3, 5, 10) if whole else (0.5, 0.25, 2))
        return made

    def _choice(self) -> dict[str, Any]:
        draw = self._random
        values = [*WORDS, 0, 1, -1.5, 1e-7, 1e300, True, None, [], {}, [1, "a"], {"k": [None]}]
        if draw.random() < 0.4:
            return {"const": draw.choice(values)}
        if draw.random() < 0.1:
            return {"enum": [f"value {i}" for i in range(draw.choice((50, 2000)))]}
        return {"enum": draw.sample(values, draw.randrange(1, 6))}

    def _object(self, depth: int) -> dict[str, Any]:
        draw = self._random
        names = draw.sample(NAMES, draw.randrange(4))
        made: dict[str, Any] = {"type": "object"}
        if names:
            made["properties"] = {name: self._any(depth) for name in names}
        required = [name for name in names if draw.random() < 0.6]
        if draw.random() < 0.1:
            required.append("required only")
        if required:
            made["required"] = required
        if draw.random() < 0.2:
            patterns = draw.sample(NAME_PATTERNS, draw.randrange(1, 3))
            made["patternProperties"] = {pattern: self._any(depth) for pattern in patterns}
        if draw.random() < 0.7:
            made["additionalProperties"] = draw.choice((False, False, self._leaf()))
        if draw.random() < 0.1:
            made[draw.choice(("minProperties", "maxProperties"))] = draw.randrange(4)
        return made

    def _array(self, depth: int) -> dict[str, Any]:
        draw = self._random
        made: dict[str, Any] = {"type": "array"}
        if draw.random() < 0.3:
            made["prefixItems"] = [self._any(depth) for _ in range(draw.randrange(1, 4))]
        if draw.random() < 0.8:
            made["items"] = self._any(depth) if draw.random() < 0.8 else False
        if draw.random() < 0.3:
            made["minItems"] = draw.randrange(3)
        if draw.random() < 0.7:
            made["maxItems"] = made.get("minItems", 0) + draw.randrange(4)
        if draw.random() < 0.1:
            made["additionalItems"] = False  # says nothing in this draft
        return made

    def _union(self, depth: int) -> dict[str, Any]:
        draw = self._random
        if draw.random() < 0.3:
            kinds = [{"type": "null"}, {"type": "string", "maxLength": 5}, self._array(depth)]
            return {"oneOf": draw.sample(kinds, 2)}
        return {"anyOf": [self._any(depth) for _ in range(draw.randrange(1, 4))]}

    def _all_of(self, depth: int) -> dict[str, Any]:
        draw = self._random
        if draw.random() < 0.5:
            return {"allOf": [self._object(depth), self._object(depth)]}
        return {**self._object(depth), "anyOf": [self._object(depth), self._object(depth)]}

    def _reference(self, depth: int) -> dict[str, Any]:
        made: dict[str, Any] = {"$ref": self._random.choice(("#/$defs/leaf", "#/$defs/node"))}
        if self._random.random() < 0.2:
            made["description"] = "elsewhere"
        return made

    def _node(self) -> dict[str, Any]:
        """Refers to itself."""
        return {
            "type": "object",
            "properties": {
                "value": self._leaf(),
                "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
            },
            "required": self._random.sample(["value", "next"], 1),
            "additionalProperties": False,
        }
