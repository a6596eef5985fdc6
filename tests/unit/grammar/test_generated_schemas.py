"""Schemas that generators write are taken, and what they forbid stays forbidden."""

import datetime as dt
import enum
import ipaddress
import json
import math
import random
import re
import uuid
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import pydantic
import pytest
import yaml

from engine.grammar.worker import GrammarError, compile_grammar
from engine.values.patterns import without_look_arounds
from tests.grammars import demo_tokenizer

TOKENIZER = demo_tokenizer(2)
FILE = Path(__file__).with_name("generated_schemas.yaml")


def allows(schema: object, text: str) -> bool:
    matcher = compile_grammar(TOKENIZER, "json_schema", json.dumps(schema))
    tokens = TOKENIZER.tokenize_str(text)
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


def rows() -> Iterator[Any]:
    for generator, types in yaml.safe_load(FILE.read_text("utf-8")).items():
        for name, row in types.items():
            yield pytest.param(row, id=f"{generator}: {name}")


@pytest.mark.parametrize("row", list(rows()))
def test_what_a_generator_writes_is_taken_or_refused_with_the_reason(row: dict[str, Any]) -> None:
    if "refused" in row:
        with pytest.raises(GrammarError, match=row["refused"]):
            allows(row["schema"], "1")
        return
    for text in row["texts"]:
        assert allows(row["schema"], text), text
    for text in row.get("others", ()):
        assert not allows(row["schema"], text), text


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Point(NamedTuple):
    x: int
    y: str = "a"


class Node(pydantic.BaseModel):
    a: int
    child: "Node | None" = None


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    n: int


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]
    s: str


Pet = Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]
UTC = dt.UTC
PYDANTIC: dict[Any, Any] = {
    **{int: 5, float: 1.5, str: "a", bool: True, bytes: b"ab", None: None, Any: [{"a": 1}]},
    Decimal: Decimal("1.50"),
    dt.date: dt.date(2020, 2, 29),
    dt.datetime: dt.datetime(2020, 2, 29, 1, 2, 3, tzinfo=UTC),
    dt.time: dt.time(1, 2, 3, tzinfo=UTC),
    dt.timedelta: dt.timedelta(days=1, seconds=5),
    uuid.UUID: uuid.UUID(int=5),
    pydantic.UUID4: uuid.UUID("12345678-1234-4234-8234-123456789012"),
    Path: Path("/a"),
    ipaddress.IPv4Address: ipaddress.ip_address("1.2.3.4"),
    ipaddress.IPv6Address: ipaddress.ip_address("::1"),
    ipaddress.IPv4Interface: ipaddress.ip_interface("1.2.3.4/24"),
    Color: Color.RED,
    Literal["a", 1]: 1,
    list[int]: [1],
    tuple[int, str]: (1, "a"),
    tuple[int, ...]: (1, 2),
    deque[int]: deque([1]),
    dict[str, int]: {"a": 1},
    dict[int, str]: {1: "a"},
    dict[Literal["a", "b"], int]: {"a": 1},
    dict[Color, int]: {Color.RED: 1},
    Counter[str]: Counter("a"),
    int | None: None,
    Point: Point(1),
    Node: Node(a=1, child=Node(a=2)),
    Pet: Cat(kind="cat", n=1),
    pydantic.SecretStr: pydantic.SecretStr("x"),
    pydantic.SecretBytes: pydantic.SecretBytes(b"x"),
    pydantic.AnyUrl: pydantic.AnyUrl("http://a.b/c"),
    pydantic.Base64Bytes: b"ab",
    pydantic.PositiveInt: 1,
    pydantic.NegativeFloat: -1.0,
    pydantic.ByteSize: 5,
    pydantic.JsonValue: {"a": [1]},
    pydantic.AwareDatetime: dt.datetime(2020, 2, 29, 1, 2, 3, tzinfo=UTC),
    Annotated[str, pydantic.StringConstraints(pattern="^a+$", max_length=3)]: "aa",
    Annotated[list[int], pydantic.Field(min_length=1, max_length=3)]: [1],
    Annotated[Decimal, pydantic.Field(max_digits=5, decimal_places=2)]: Decimal("1.50"),
}
"""Types that pydantic describes, and a value of each."""


@pytest.mark.parametrize("mode", ["validation", "serialization"])
@pytest.mark.parametrize("type_", PYDANTIC, ids=str)
def test_what_pydantic_writes_of_a_value_is_allowed_by_what_it_writes_of_its_type(
    type_: Any, mode: Literal["validation", "serialization"]
) -> None:
    adapter = pydantic.TypeAdapter[Any](type_)
    schema, text = adapter.json_schema(mode=mode), adapter.dump_json(PYDANTIC[type_]).decode()
    assert allows(schema, text), (text, schema)


@pytest.mark.parametrize(
    ("pattern", "letters"),
    [
        (
            r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]"
            r"@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
            "aB1_'+-.@",
        ),
        (
            r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?"
            r"(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$",
            "PTWYMDHS1.",
        ),
        (r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$", "01.+-e"),
        *((rf"^(?!^[-+.]*$)[+-]?0*\d*\.?\d{{0,{n}}}0*$", "01.+-e") for n in (0, 1, 2, 5)),
    ],
)
def test_a_pattern_without_look_arounds_is_equal(pattern: str, letters: str) -> None:
    equal = without_look_arounds(pattern)
    assert equal is not None
    assert "(?!" not in equal
    assert "(?=" not in equal
    chance, n_matches = random.Random(7), 0
    begin = "P" if letters.startswith("P") else ""
    for _ in range(20_000):
        text = begin + "".join(chance.choices(letters, k=chance.randint(0, 9)))
        if "@" in letters and chance.random() < 0.7:
            text = f"{text}@{chance.choice('aB1')}.{chance.choice(['org', 'a', 'B1.de', '-.de'])}"
        is_match = bool(re.search(pattern, text, re.ASCII))
        assert bool(re.search(equal, text, re.ASCII)) is is_match, text
        n_matches += is_match
    assert n_matches > 50


EXACT = [2**53, 2**53 + 2, 2**60, 2**62, -(2**60), 10**20, 1e20, 1e22, 0.1]
NOT_EXACT = [2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 2**70, 10**30]


@pytest.mark.parametrize("number", EXACT)
def test_a_large_constant_is_written_as_it_is(number: float) -> None:
    text = str(int(number)) if abs(number) > 1 else str(number)
    for schema in ({"const": number}, {"enum": [number, "a"]}, {"items": {"const": number}}):
        assert allows(schema, f"[{text}]" if "items" in schema else text)


@pytest.mark.parametrize("number", NOT_EXACT)
def test_a_constant_that_would_be_written_as_another_is_refused(number: int) -> None:
    for schema in ({"const": number}, {"enum": [number, "a"]}, {"items": {"const": number}}):
        with pytest.raises(GrammarError, match="is not a 64-bit float"):
            allows(schema, "1")


def fractions(n: int) -> list[float]:
    """Of up to 17 digits."""
    chance = random.Random(n)
    found = [chance.choice((1, 1e6)) * chance.uniform(-1, 1) for _ in range(n)]
    return [*found, *(round(number, 9) for number in found[: n // 4])]


def test_a_fraction_is_written_as_it_is_or_refused() -> None:
    n_taken = 0
    for number in fractions(60):
        with suppress(GrammarError):
            assert allows({"const": number}, repr(number))
            n_taken += 1
    assert n_taken >= 15, "those of 15 digits"


def test_no_fraction_beyond_a_bound_is_allowed() -> None:
    for number in fractions(60):
        below, above = math.nextafter(number, -math.inf), math.nextafter(number, math.inf)
        assert not allows({"type": "number", "minimum": number}, repr(below))
        assert not allows({"type": "number", "maximum": number}, repr(above))
        assert allows({"type": "number", "minimum": number}, repr(math.ceil(number) + 1.5))


BOUNDS = [
    sign * (2**power + step)
    for sign in (1, -1)
    for power in (53, 56, 60, 63)
    for step in (-1, 0, 1)
]
KEEPS = {
    "minimum": lambda value, bound: value >= bound,
    "exclusiveMinimum": lambda value, bound: value > bound,
    "maximum": lambda value, bound: value <= bound,
    "exclusiveMaximum": lambda value, bound: value < bound,
}


@pytest.mark.parametrize("type_", ["integer", "number", ["integer", "null"], None])
@pytest.mark.parametrize("key", KEEPS)
def test_no_number_beyond_a_large_bound_is_allowed(key: str, type_: object) -> None:
    """Some of those bounds are refused; those of 64-bit integers are not."""
    for bound in (*BOUNDS, *map(float, BOUNDS)):
        schema = {key: bound} if type_ is None else {"type": type_, key: bound}
        for value in {
            int(bound) + step for step in (-1025, -129, -9, -2, -1, 0, 1, 2, 9, 129, 1025)
        }:
            try:
                is_allowed = allows(schema, str(value))
            except GrammarError:
                break
            assert KEEPS[key](value, bound) or not is_allowed, (schema, value)


def test_the_bounds_of_integers_of_64_bits_are_taken() -> None:
    schema = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
    for value in (0, -1, 2**63 - 1, -(2**63) + 1024, -(2**53) - 1):
        assert allows(schema, str(value))
    for value in (2**63, -(2**63) - 1):
        assert not allows(schema, str(value))
