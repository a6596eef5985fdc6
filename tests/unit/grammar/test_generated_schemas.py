"""Schemas that generators write are taken, and what they forbid stays forbidden."""

import json
import math
import random
import re
from contextlib import suppress
from typing import Any

import pytest
from llguidance import LLMatcher

from engine.grammar.worker import GrammarError, compile_grammar
from engine.values.patterns import without_look_arounds
from tests.grammars import demo_tokenizer
from tests.schemas.answers import validator_of
from tests.schemas.corpora import VALUES, by_hand, kept
from tests.schemas.sampling import Sampler

TOKENIZER = demo_tokenizer(2)


def allows(schema: object, text: str) -> bool:
    matcher = compile_grammar(TOKENIZER, "json_schema", json.dumps(schema))
    tokens = TOKENIZER.tokenize_str(text)
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


@pytest.mark.parametrize("row", [pytest.param(row, id=name) for name, row in by_hand()])
def test_what_a_generator_writes_is_taken_or_refused_with_the_reason(row: dict[str, Any]) -> None:
    if "refused" in row:
        with pytest.raises(GrammarError, match=row["refused"]):
            allows(row["schema"], "1")
        return
    for text in row["texts"]:
        assert allows(row["schema"], text), text
    for text in row.get("others", ()):
        assert not allows(row["schema"], text), text


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
BEYOND = [2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 2**70, 10**30]


@pytest.mark.parametrize("number", EXACT)
def test_a_large_constant_is_written_as_it_is(number: float) -> None:
    text = str(int(number)) if abs(number) > 1 else str(number)
    for schema in ({"const": number}, {"enum": [number, "a"]}, {"items": {"const": number}}):
        assert allows(schema, f"[{text}]" if "items" in schema else text)


@pytest.mark.parametrize("number", BEYOND)
def test_a_constant_that_would_be_written_as_another_is_refused(number: int) -> None:
    for schema in ({"const": number}, {"enum": [number, "a"]}, {"items": {"const": number}}):
        with pytest.raises(GrammarError, match="is not a 64-bit float"):
            allows(schema, "1")


@pytest.mark.parametrize("number", [2**53 + 1, -(2**53) - 1, 2**62 + 1, 2**63 - 1])
def test_an_integer_between_two_floats_is_written_as_it_is(number: int) -> None:
    for schema in ({"const": number}, {"enum": [number, "a"]}, {"enum": [1, number, 0.5]}):
        assert allows(schema, str(number))
        assert not any(allows(schema, str(number + step)) for step in (-1024, -2, -1, 2, 1024))
    assert allows({"enum": [number, "a"]}, '"a"')
    assert allows({"type": "integer", "const": number, "title": "A"}, str(number))


def test_integers_of_64_bits_are_written_as_they_are_or_refused() -> None:
    draw, n_taken = random.Random(5), 0
    for bits in range(54, 64):
        for sign in (1, -1) * 8:
            number = sign * (draw.getrandbits(bits) | 1 << bits - 1)
            with suppress(GrammarError):
                matcher = compile_grammar(TOKENIZER, "json_schema", json.dumps({"const": number}))
                n_taken += 1
                steps = {0, *(s * 2**power for power in range(12) for s in (1, -1))}
                steps |= {draw.randint(-3000, 3000) for _ in range(20)}
                taken = {step for step in steps if is_allowed(matcher, number + step)}
                assert taken == {0}, number
    assert n_taken > 100, "of 160"


@pytest.mark.parametrize("value", [[2**53 + 1], {"a": 2**53 + 1}])
def test_an_integer_between_two_floats_within_a_constant_is_refused(value: object) -> None:
    with pytest.raises(GrammarError, match="is not a 64-bit float"):
        allows({"const": value}, "1")


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


REFUSED = {
    **{
        f"typebox: Type.{name}": "Invalid type"
        for name in (
            *("BigInt()", "Date()", "Symbol()", "Uint8Array()", "Undefined()", "Void()"),
            *("RegExp(/^a+$/)", "RegExp(/^a+$/i)", "Promise(Type.String())", "Function()"),
        )
    },
    **dict.fromkeys(("typebox: Type.Never()", "zod: z.never()"), "Unsatisfiable schema"),
    "typebox: Type.String({ format: 'regex' })": "Unknown format: regex",
    "typebox: Type.Array({ uniqueItems })": "uniqueItems",
    "typebox: Type.Array({ contains })": "contains",
    "typebox: Type.Intersect({ unevaluatedProperties: false })": "unevaluatedProperties",
    "zod: z.float32()": "minimum is not supported beyond 64-bit integers",
    "zod: z.float64()": "minimum is not supported beyond 64-bit integers",
    "zod: z.jwt()": "Unknown format: jwt",
    "zod: z.record(z.email(), z.int())": "propertyNames",
    "zod: z.xor([z.object({ a }), z.object({ b })])": "oneOf",
    **{
        f"go-invopop: Tagged{how}": "uniqueItems"
        for how in ("", ", expanded", ", required from tags, ids", ", without references")
    },
    "go-invopop: Tree, expanded": "leads nowhere",
    "java-victools: Jack, strict, inline": "Unsatisfiable schema",
}
"""Reasons, as regular expressions."""


@pytest.mark.parametrize(("name", "schema"), kept().items(), ids=list(kept()))
def test_what_a_generator_writes_allows_what_is_valid_alone(name: str, schema: Any) -> None:
    if name in REFUSED:
        with pytest.raises(GrammarError, match=REFUSED[name]):
            allows(schema, "1")
        return
    matcher = compile_grammar(TOKENIZER, "json_schema", json.dumps(schema))
    validator = validator_of(schema)
    allowed = [value for value in VALUES if is_allowed(matcher, value)]
    drawn = [json.loads(text) for text in Sampler(TOKENIZER, 2, seed=7).texts(matcher, 6)]
    assert allowed or drawn, "no value to try it with"
    assert [value for value in [*allowed, *drawn] if not validator.is_valid(value)] == []


def is_allowed(grammar: LLMatcher, value: object) -> bool:
    matcher = grammar.deep_copy()
    tokens = TOKENIZER.tokenize_str(json.dumps(value, ensure_ascii=False))
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())
