"""`oneOf` is enforced where its branches exclude each other, and else refused."""

import itertools
import json
import random
from contextlib import suppress
from typing import Any

import jsonschema
import jsonschema_rs
import pytest

from engine.grammar.json_schema import faithful
from engine.grammar.worker import GrammarError, compile_grammar
from engine.values.negations import without_not
from engine.values.one_of import MOST_BRANCHES, as_any_of
from engine.values.schemas import plain, refuse
from tests.grammars import demo_tokenizer

TOKENIZER = demo_tokenizer(2)
CLOSED = {"type": "object", "additionalProperties": False}
KIND = {"type": "object", "required": ["k"]}
A = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {}}}


def allows(schema: object, value: object) -> bool:
    matcher = compile_grammar(TOKENIZER, "json_schema", json.dumps(schema))
    tokens = TOKENIZER.tokenize_str(json.dumps(value))
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


@pytest.mark.parametrize(
    "schema",
    [
        A | {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        A | {"additionalProperties": False, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        {"oneOf": [{"required": ["a"]}, {"required": ["b"], "title": "B"}]},
        A | {"oneOf": [{"required": ["k", "a"]}, {"required": ["k", "b"]}]},
        A | {"oneOf": [{"required": ["a"]}]},
        A | {"oneOf": [{"required": ["a", "k"]}, {"required": ["b"]}, {"required": ["b", "c"]}]},
        {
            "oneOf": [
                CLOSED | {"properties": {"a": {}}, "required": ["a"]},
                CLOSED | {"properties": {"b": {}}, "required": ["b"]},
            ]
        },
        {
            "oneOf": [{"$ref": "#/definitions/A"}, {"$ref": "#/definitions/B"}],
            "definitions": {
                "A": KIND | {"properties": {"k": {"enum": ["x", "y"]}}},
                "B": {"allOf": [KIND | {"properties": {"k": {"$ref": "#/definitions/Z"}}}]},
                "Z": {"const": "z"},
            },
        },
        {"oneOf": [{"type": "integer", "maximum": 3}, {"type": "number", "minimum": 4}]},
        {"oneOf": [{"type": "string"}, {"anyOf": [{"type": "null"}, {"type": "array"}]}]},
        A | {"anyOf": [{"required": ["a"]}], "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
    ],
)
def test_one_of_is_enforced(schema: dict[str, Any]) -> None:
    is_valid = jsonschema.Draft202012Validator(schema).is_valid
    members: tuple[dict[str, Any], ...] = (
        {"k": "x"},
        {"k": "z"},
        {"k": 1},
        {"a": 1},
        {"b": 1},
        {"c": 1},
    )
    objects = [
        {name: value for one in chosen for name, value in one.items()}
        for n in range(4)
        for chosen in itertools.combinations(members, n)
    ]
    for value in (*objects, 1, 3, 3.5, 4, 4.5, "x", None, [], [1], True):
        is_ordered = (
            list(value) == sorted(value, key="abkc".index) if isinstance(value, dict) else 1
        )
        if is_ordered or not is_valid(value):
            assert allows(schema, value) is is_valid(value), value


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        {"oneOf": [{"required": [f"a{m}{n}" for n in range(9)]} for m in range(9)]},
        {"oneOf": [{"type": "object"}, {"type": "object", "required": ["a"]}]},
        {"oneOf": [{"const": n} for n in [*range(MOST_BRANCHES), "a", 1.0]]},
    ],
)
def test_branches_that_may_both_hold_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(GrammarError, match="oneOf"):
        allows(schema, 1)


class Drawn:
    """Random schemas of few properties, so that branches are often near each other."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._definition: Any = None
        self._definition = self.schema(1)

    def schema(self, depth: int = 2) -> Any:
        draw = self._random
        if draw.random() < 0.05:
            return draw.choice([True, False, {}])
        made: dict[str, Any] = {}
        if draw.random() < 0.6:
            made["type"] = draw.choice(["object", "object", "integer", "number", "string", "null"])
        if draw.random() < 0.3:
            made["enum"] = draw.sample([1, 1.0, 2, "a", "b", None, True, [1], {"a": 1}], 2)
        if draw.random() < 0.1:
            made["const"] = draw.choice([1, "a", True, 1.5])
        if draw.random() < 0.2:
            made[draw.choice(["minimum", "maximum"])] = draw.choice([1, 2, 1.5])
        if draw.random() < 0.5:
            made["required"] = draw.sample("abc", draw.randint(1, 2))
        if depth and draw.random() < 0.6:
            names = draw.sample("abc", draw.randint(1, 3))
            made["properties"] = {name: self.schema(depth - 1) for name in names}
            if draw.random() < 0.4:
                made["additionalProperties"] = False
        if depth and draw.random() < 0.15:
            key = draw.choice(["anyOf", "allOf", "oneOf"])
            made[key] = [self.schema(depth - 1) for _ in range(2)]
        if draw.random() < 0.1 and self._definition is not None:
            made["$ref"] = "#/$defs/x"
        return made

    def negation(self) -> dict[str, Any]:
        made = {"not": self.schema(1), "$defs": {"x": self._definition}}
        return made | ({"type": "object"} if self._random.random() < 0.3 else {})

    def one_of(self) -> dict[str, Any]:
        n_branches = self._random.randint(1, 3)
        made = {
            "oneOf": [self.schema() for _ in range(n_branches)],
            "$defs": {"x": self._definition},
        }
        return made | ({"type": "object"} if self._random.random() < 0.3 else {})


VALUES: list[Any] = [
    *(None, True, 1, 1.0, 2, 1.5, "a", "b", [1], {}),
    *(
        {n: v for n, v in zip("abc", values, strict=True) if v != "-"}
        for values in itertools.product((1, "a", "-"), (2, "b", {"a": 1}, "-"), (True, "-"))
    ),
]


KEYWORDS = (
    *("oneOf", "not", "dependencies", "dependentRequired", "dependentSchemas", "required", "enum"),
    *("type", "properties", "minimum", "minLength", "format", "contentEncoding", "$ref", "allOf"),
    *("propertyNames", "pattern", "const", "anyOf", "additionalProperties", "$id", "definitions"),
)
ODD: list[Any] = [
    *(None, True, 0, -1, 2.5, 10**400, "", "x", "base64", [], [1], ["a"], [True], [{}], [[]]),
    *({}, {"a": 1}, {"a": []}, {"a": ["b"]}, {"allOf": {"a": 1}}, {"allOf": [True]}, {"not": 1}),
    *({"allOf": [{"pattern": 1}]}, {"required": [1]}, {"type": [1]}, {"minLength": 1e300}),
]


def test_odd_values_of_keywords_are_taken_or_refused() -> None:
    draw = random.Random(3)
    for _ in range(1000):
        schema: dict[str, Any] = {}
        place = schema
        for keyword in draw.sample(KEYWORDS, draw.randint(1, 4)):
            place[keyword] = draw.choice(ODD)
            if draw.random() < 0.3:
                place[draw.choice(["not", "propertyNames"])] = place = {}
        branches = [schema, draw.choice(ODD)]
        for one in (schema, {"oneOf": branches}, {"not": schema}, {"dependencies": {"a": schema}}):
            with suppress(ValueError):
                faithful(json.dumps(one))


def test_what_is_put_without_not_is_equal() -> None:
    n_put = n_valid = 0
    for seed in range(1500):
        drawn = Drawn(seed)
        schema = drawn.negation()
        put = without_not(schema, lambda reference, at=schema: at["$defs"]["x"])  # type: ignore[misc]
        n_put += "not" not in put
        before = jsonschema_rs.Draft202012Validator(schema).is_valid
        for again in (put, plain(schema, schema, refuse)):
            after = jsonschema_rs.Draft202012Validator(again).is_valid
            for value in VALUES:
                is_valid = before(value)
                assert after(value) is is_valid, (seed, value, again)
                n_valid += is_valid
    assert n_put > 300
    assert n_valid > 1000


@pytest.mark.parametrize(
    "never",
    [
        {"required": ["a"]},
        {"required": ["a", "b"]},
        {"anyOf": [{"required": ["a"]}, {"required": ["b"], "title": "B"}]},
        {"type": "string"},
        {"type": ["object", "null"]},
        {"type": "number", "minimum": 3},
        {"properties": {"a": {"type": "string"}}, "required": ["a"]},
        {"not": {"type": "object"}},
        {"minLength": 2},
    ],
)
@pytest.mark.parametrize("more", [{}, A])
def test_not_is_enforced(never: dict[str, Any], more: dict[str, Any]) -> None:
    schema = more | {"not": never}
    is_valid = jsonschema.Draft202012Validator(schema).is_valid
    values: list[Any] = [
        {},
        {"a": 1},
        {"b": 1},
        {"a": 1, "b": 1},
        1,
        3,
        2.5,
        "x",
        "xy",
        None,
        [],
        [1],
    ]
    if not any(map(is_valid, values)):
        with pytest.raises(GrammarError, match="Unsatisfiable"):
            allows(schema, {})
        return
    for value in values:
        assert allows(schema, value) is is_valid(value), value


def test_what_is_put_as_any_of_is_equal() -> None:
    n_put = n_valid = 0
    for seed in range(1500):
        schema = Drawn(seed).one_of()
        put = as_any_of(schema, lambda reference, at=schema: at["$defs"]["x"])  # type: ignore[misc]
        n_put += "oneOf" not in put
        whole = plain(schema, schema, refuse)
        for again in (put, whole):
            before = jsonschema_rs.Draft202012Validator(schema).is_valid
            after = jsonschema_rs.Draft202012Validator(again).is_valid
            for value in VALUES:
                is_valid = before(value)
                assert after(value) is is_valid, (seed, value, again)
                n_valid += is_valid
    assert n_put > 300
    assert n_valid > 1000
